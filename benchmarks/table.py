"""The form of every benchmark's result: rows, the machine they were measured on, one JSON file, one printed table."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "onnxruntime", "transformers", "torchao", "grpcio", "protobuf")


@dataclass(frozen=True)
class Row:
    """One figure. `peer` is what it is held against, measured in the same run; `ratio` = value / peer_value.

    `aim` says the bound in words (`<= 0.30`); `met` is None where there is no aim.
    """

    measure: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    aim: str = ""
    met: bool | None = None


def against(measure: str, value: float, unit: str, *, peer: str, peer_value: float, aim: str = "") -> Row:
    """A row with its ratio to the peer; the aim, where there is one, is a bound on the ratio."""
    ratio = value / peer_value
    return Row(measure, value, unit, peer, peer_value, ratio, aim, _met(ratio, aim))


def aimed(measure: str, value: float, unit: str, *, aim: str) -> Row:
    """A row whose aim is a bound on the value itself."""
    return Row(measure, value, unit, aim=aim, met=_met(value, aim))


def beside(measure: str, value: float, unit: str, *, peer: tuple[str, float], aim: str = "") -> Row:
    """A row next to a peer's figure; the aim, where there is one, is a bound on the value itself."""
    name, figure = peer
    return Row(measure, value, unit, name, figure, value / figure if figure > 0 else None, aim, _met(value, aim))


def _met(figure: float, aim: str) -> bool | None:
    if not aim:
        return None
    comparison, bound = aim.split()
    return figure <= float(bound) if comparison == "<=" else figure >= float(bound)


def percentile_95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def machine() -> dict[str, str | int | float]:
    """What is needed to judge the figures; no host name. The load says what else ran: 1 per core is a busy machine."""
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine()
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def write(name: str, rows: Sequence[Row], *, threads: int, repeats: int) -> None:
    """Print the table and write `benchmarks/results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    document = {"benchmark": name, "machine": machine(), "threads": threads, "repeats": repeats}
    document["rows"] = [asdict(row) for row in rows]
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    table = Table("measure", "value", "unit", "peer", "peer value", "ratio", "aim", "met", title=name)
    for row in rows:
        table.add_row(*(_cell(value) for value in asdict(row).values()))
    Console(width=160).print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
