"""Progress: plain lines without escape codes in logs, one live line on a terminal."""

import io
from datetime import datetime, timezone

import pytest
from rich.console import Console

from modelpress.cli.progress_view import LiveView, PlainView, duration, progress_view, show_event, show_transfer, size
from modelpress.reports import Verdict
from modelpress.views import (
    ConversionState,
    Event,
    Progress,
    StateChanged,
    StepFinished,
    StepStarted,
    TransferProgress,
    Warned,
)

EVENTS = (
    StateChanged(ConversionState.RUNNING, None, None),
    StepStarted("compress/2-prune", 2, 9),
    Progress("compress/2-prune", 2, 9, 50, 200, 0.12345, 75.0),
    Warned("7 texts were cut\x1b[31m"),
    StepFinished(
        "compress/2-prune",
        12.34,
        False,
        "sha256:0",
        {"held_out_accuracy": 0.94, "held_out_accuracy_before": 0.95123, "peak_memory_bytes": 496e6},
    ),
    StepFinished("evaluate", 0.0, True, "", {}),
    StateChanged(ConversionState.SUCCEEDED, None, Verdict.REJECTED),
    None,
)


def event(body):
    return Event(1, datetime(2026, 1, 1, tzinfo=timezone.utc), body)


@pytest.fixture
def plain():
    stream = io.StringIO()
    return Console(file=stream, width=200, highlight=False, markup=False), stream


def test_a_log_has_one_plain_line_per_thing_that_happened(plain):
    console, stream = plain
    with progress_view(console) as view:
        for body in EVENTS:
            show_event(view, event(body))
    assert stream.getvalue().splitlines() == [
        "conversion running",
        "warning: 7 texts were cut\N{REPLACEMENT CHARACTER}[31m",
        "done compress/2-prune in 12.3 s: held out accuracy 0.9512 -> 0.94, peak memory 496.0 MB",
        "done evaluate from the cache",
        "conversion succeeded: REJECTED",
    ]


def test_a_log_says_every_ten_seconds_how_far_a_step_is(plain):
    console, stream = plain
    now = [0.0]
    view = PlainView(console, clock=lambda: now[0])
    for second in range(26):
        now[0] = float(second)
        show_event(view, event(Progress("compress/2-prune", 2, 9, second, 100, 0.5, 100.0 - second)))
    assert stream.getvalue().splitlines() == [
        "[2/9] compress/2-prune 10%, 10/100, loss 0.5, 1 min 30 s left",
        "[2/9] compress/2-prune 20%, 20/100, loss 0.5, 1 min 20 s left",
    ]


def test_what_is_not_known_is_not_shown(plain):
    console, stream = plain
    now = [0.0]
    view = PlainView(console, clock=lambda: now[0])
    for second in (0.0, 10.0):
        now[0] = second
        show_event(view, event(Progress("parity", 3, 9, 0, 0, None, None)))
    assert stream.getvalue().splitlines() == ["[3/9] parity"]


def test_a_terminal_gets_one_live_line_that_disappears():
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=True, highlight=False, markup=False)
    with progress_view(console) as view:
        assert isinstance(view, LiveView)
        show_transfer(view, "uploading model")(TransferProgress(5_000_000, 10_000_000))
        for body in EVENTS:
            show_event(view, event(body))
    text = stream.getvalue()
    assert "50/200, loss 0.1235, 1 min 15 s left" in text
    assert "done evaluate from the cache" in text
    assert text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K") or "\x1b[?25h" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (23_400_000, "23.4 MB"), (5 * 10**12, "5.0 TB")],
)
def test_sizes(size_bytes, text):
    assert size(size_bytes) == text
