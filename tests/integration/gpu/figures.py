"""What a run of the scenarios found, as figures with their limits: a table for people, a document to keep."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
_FIGURE = 2
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the figures are of."""

    gpu: str
    driver: str
    torch: str
    cuda: str
    python: str
    kvdiag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure. `ok` says whether it is within `limit`; `None` where it has none."""

    name: str
    value: float | str | None
    unit: str = ""
    limit: str = ""
    ok: bool | None = None


def at_most(name: str, value: float, limit: float, unit: str) -> Figure:
    """A figure that may not exceed a limit."""
    return Figure(name=name, value=value, unit=unit, limit=f"<= {readable(limit, unit)}", ok=value <= limit)


def at_least(name: str, value: float, limit: float, unit: str) -> Figure:
    """A figure that has to reach a limit."""
    return Figure(name=name, value=value, unit=unit, limit=f">= {readable(limit, unit)}", ok=value >= limit)


def exactly(name: str, value: float | str | None, expected: float | str | None, unit: str = "") -> Figure:
    """A figure that can only be one thing."""
    return Figure(name=name, value=value, unit=unit, limit=readable(expected, unit), ok=value == expected)


def one_of(name: str, value: str, expected: Sequence[str]) -> Figure:
    """A word that may be one of several."""
    return Figure(name=name, value=value, limit=" or ".join(expected), ok=value in expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One scenario's figures, or why it came to none."""

    scenario: str
    about: str
    figures: tuple[Figure, ...] = ()
    failed: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ran, found something that has a limit, and everything is within."""
        judged = [figure.ok for figure in self.figures if figure.ok is not None]
        return self.failed is None and bool(judged) and all(judged)


def table(machine: Machine, results: Sequence[Result]) -> str:
    """The figures in columns, each scenario with its verdict."""
    rows = [("", "scenario", "figure", "value", "limit")]
    for result in results:
        rows.append(("ok" if result.ok else "FAILED", result.scenario, result.failed or result.about, "", ""))
        rows += [
            (
                {True: "ok", False: "FAILED", None: ""}[figure.ok],
                "",
                figure.name,
                readable(figure.value, figure.unit),
                figure.limit,
            )
            for figure in result.figures
        ]
    # A sentence about a scenario may run into the columns that it leaves empty.
    widths = [
        max(len(row[column]) for row in rows if column != _FIGURE or not row[1]) for column in range(len(rows[0]))
    ]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    subject = f"{machine.gpu}, driver {machine.driver}, torch {machine.torch}, CUDA {machine.cuda}"
    return "\n".join([subject, *lines]) + "\n"


def readable(value: float | str | None, unit: str) -> str:
    """A figure as people read it."""
    if value is None:
        return "not told"
    if isinstance(value, str):
        return value
    if unit == "bytes" and abs(value) >= MIB:
        return f"{value / MIB:,.1f} MiB"
    return f"{value:,.6g} {unit}".strip()


def keep(path: Path, machine: Machine, results: Sequence[Result]) -> None:
    """Write the document that is committed with the traces."""
    path.write_text(json.dumps(document(machine, results), indent=1) + "\n")


def document(machine: Machine, results: Sequence[Result]) -> dict[str, Any]:
    """Machine and figures as plain values."""
    scenarios = [{**asdict(result), "ok": result.ok} for result in results]
    return {"kvdiag_gpu_figures": FORMAT, "machine": asdict(machine), "scenarios": scenarios}
