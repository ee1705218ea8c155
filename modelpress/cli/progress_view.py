"""Progress on stderr: a live line with a bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from modelpress.cli.output import note, printable
from modelpress.views import Event, Progress, StateChanged, StepFinished, StepStarted, TransferProgress, Warned

PLAIN_INTERVAL_S = 10.0
"""Between two lines about the same step or transfer where nobody watches a bar."""


class ProgressView(Protocol):
    """Lines for what happened, and the state of the one thing that is going on."""

    def line(self, text: str) -> None:
        """Something that happened; stays."""

    def update(self, title: str, done: int, total: int, detail: str) -> None:
        """What is going on; the next one takes its place. `total` 0: not known. May be called from any thread."""

    def close(self) -> None:
        """Nothing is going on any more."""


class PlainView:
    """Lines without escape codes: for logs."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._title = ""
        self._shown = clock()

    def line(self, text: str) -> None:
        note(self._console, text)

    def update(self, title: str, done: int, total: int, detail: str) -> None:
        if title != self._title:
            self._title, self._shown = title, self._clock()
        elif self._clock() - self._shown >= PLAIN_INTERVAL_S:
            self._shown = self._clock()
            share = f" {done / total:.0%}" if total else ""
            self.line(f"{title}{share}{detail and f', {detail}'}")

    def close(self) -> None:
        self._title = ""


class LiveView:
    """One line at the bottom that is drawn over."""

    def __init__(self, console: Console) -> None:
        title = TextColumn("{task.description}", markup=False)
        detail = TextColumn("{task.fields[detail]}", markup=False)
        self._bar = Bar(title, BarColumn(bar_width=24), detail, console=console, transient=True)
        self._task: TaskID | None = None

    def line(self, text: str) -> None:
        note(self._bar.console, text)

    def update(self, title: str, done: int, total: int, detail: str) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", detail="")
            self._bar.start()
        self._bar.update(
            self._task, description=printable(title).plain, completed=done, total=total or None, detail=detail
        )

    def close(self) -> None:
        self._bar.stop()
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None


@contextmanager
def progress_view(console: Console) -> Iterator[ProgressView]:
    """The view that fits the console, closed however the block ends."""
    view: ProgressView = LiveView(console) if console.is_terminal else PlainView(console)
    try:
        yield view
    finally:
        view.close()


def show_transfer(view: ProgressView, title: str) -> Callable[[TransferProgress], None]:
    """What to give `upload_folder` or `download` as `show`."""

    def show(progress: TransferProgress) -> None:
        detail = f"{size(progress.done_bytes)} of {size(progress.total_bytes)}"
        view.update(title, progress.done_bytes, progress.total_bytes, detail)

    return show


def show_event(view: ProgressView, event: Event) -> None:
    """One event of a conversion: a line, or the state of the step that runs."""
    body = event.body
    if isinstance(body, Progress):
        title = f"[{body.step_index}/{body.step_count}] {body.step}"
        view.update(title, body.done, body.total, _detail(body))
    elif isinstance(body, StepStarted):
        view.update(f"[{body.step_index}/{body.step_count}] {body.step}", 0, 0, "")
    elif body is not None:
        view.line(describe(body))


def describe(body: StateChanged | StepFinished | Warned) -> str:
    """One line for people."""
    if isinstance(body, Warned):
        return f"warning: {body.message}"
    if isinstance(body, StateChanged):
        return f"conversion {body.state.value.lower()}" + (f": {body.verdict.value}" if body.verdict else "")
    figures = ", ".join(_figures(body.figures))
    how = "from the cache" if body.cached else f"in {body.seconds:.1f} s"
    return f"done {body.step} {how}" + (f": {figures}" if figures else "")


def _figures(figures: Mapping[str, float]) -> Iterator[str]:
    """`accuracy 0.953 -> 0.948` where `accuracy_before` is there too; the unit stands in the name."""
    for name, value in sorted(figures.items()):
        if name.endswith("_before"):
            continue
        before = figures.get(f"{name}_before")
        change = f"{_figure(name, before)} -> " if before is not None else ""
        yield f"{name.removesuffix('_bytes').replace('_', ' ')} {change}{_figure(name, value)}"


def _figure(name: str, value: float) -> str:
    """Bytes are shown as people read them."""
    return size(round(value)) if name.endswith("_bytes") else f"{value:.4g}"


def _detail(progress: Progress) -> str:
    parts = [f"{progress.done}/{progress.total}" if progress.total else ""]
    parts += [f"loss {progress.loss:.4g}" if progress.loss is not None else ""]
    parts += [f"{duration(progress.remaining_s)} left" if progress.remaining_s is not None else ""]
    return ", ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(size_bytes: int) -> str:
    """Decimal units, as disks and networks have them: `23.4 MB`."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
