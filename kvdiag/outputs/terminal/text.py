"""The diagnosis for a person at a terminal: verdict first, evidence next, remedy last. Readable at 80 columns.

Names and error texts come from servers and drivers: `cells.plain` is the only way any of them reaches the screen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from rich.console import Group, RenderableType
from rich.text import Text

from kvdiag.formatting import format_bytes, format_count, format_ratio
from kvdiag.kv.calibration.running_server import Served, pool_bytes, served
from kvdiag.model import Device, Diagnosis, Facts, Finding, Gap, LedgerLine, Status, StepResult
from kvdiag.outputs.presentation import (
    ADVICE,
    NOT_REPORTED,
    UNKNOWN,
    WORDS,
    engine_of,
    evidence_value,
    memory_used,
    pool_title,
    problems_of,
    sections,
    sentence,
    signed,
    spaced,
    unknown_by_reason,
)
from kvdiag.outputs.terminal.cells import columns, grid, heading, indented, plain

STYLES: dict[Status, str] = {"ok": "green", "suspect": "yellow", "fault": "red", "unknown": "magenta"}


def render(diagnosis: Diagnosis) -> RenderableType:
    """Render a diagnosis for rich, at any width: verdict and server, steps, problems, checks, ledger, missing data.

    Text from a server is escaped: it acts neither as markup nor as control characters.
    """
    parts: list[RenderableType] = [
        headed(diagnosis.worst, sentence(diagnosis)),
        _subject(diagnosis.facts, sampled=bool(diagnosis.samples)),
    ]
    if diagnosis.steps:
        parts += [heading("Test steps"), _steps(diagnosis.steps)]
    for finding in problems_of(diagnosis.findings):
        parts += [heading(finding.id), problem(finding)]
    for title, findings in sections(diagnosis):
        verdicts = grid((Text(one.id, style=STYLES[one.status]), one.summary) for one in findings)
        parts += [heading(title), unknowns(findings) if title == UNKNOWN else verdicts]
    if diagnosis.ledger:
        parts += [heading("Memory ledger"), ledger_table(diagnosis.ledger)]
    if diagnosis.gaps:
        parts += [heading("Missing data"), gap_list(diagnosis.gaps)]
    return Group(*parts)


def render_audit(
    facts: Facts, devices: Sequence[Device], lines: tuple[LedgerLine, ...], gaps: tuple[Gap, ...]
) -> RenderableType:
    """The memory audit alone."""
    parts: list[RenderableType] = [_subject(facts)]
    for device in devices:
        state = "memory cannot be read" if device.memory is None else memory_used(device.memory)
        parts += [heading(f"GPU {device.index}  {device.name}"), plain(f"  {state}")]
        own = tuple(line for line in lines if line.uuid == device.uuid)
        if own:
            parts.append(ledger_table(own))
    models = [model for pool in facts.pools if isinstance(model := served(facts, pool), Served) and model.figures]
    for model in dict.fromkeys(models):
        parts += [heading("KV pool: predicted from the model's config, and reported by the engine"), _figures(model)]
    pool = tuple(line for line in lines if line.gpu is None)
    if pool:
        parts += [heading("KV pool, as reported by the engine (no GPU was observed)"), ledger_table(pool)]
    if gaps:
        parts += [heading("Missing data"), gap_list(gaps)]
    return Group(*parts)


def headed(status: Status, text: str) -> Text:
    """The first line of a result: its status and its verdict."""
    return Text.assemble((WORDS[status], f"bold {STYLES[status]}"), "  ", plain(text))


def _subject(facts: Facts, *, sampled: bool = True) -> RenderableType:
    """The server, its model and its pool; of a crash without samples only what its artifacts show."""
    engine = engine_of(facts)
    pools = "; ".join(pool_title(pool, pool_bytes(facts, pool)) for pool in facts.pools)
    models = dict.fromkeys(_cost_model(served(facts, pool)) for pool in facts.pools)
    rows = [
        ("server", f"{facts.url} ({engine})" if facts.url and engine else facts.url or engine or NOT_REPORTED),
        ("model", facts.model or NOT_REPORTED),
        ("KV pool", pools or NOT_REPORTED),
        *(("KV layout", model) for model in models),
    ]
    return grid(row for row in rows if sampled or row[1] != NOT_REPORTED)


def _figures(model: Served) -> RenderableType:
    table = columns("=", ">predicted", ">reported", ">difference")
    for figure in model.figures:
        drift = signed(format_ratio(figure.drift_ratio)) if figure.drift_ratio else "exact"
        table.add_row(figure.title, _count(figure.predicted.nominal), _count(figure.reported.nominal), drift)
    return indented(Group(table, plain(f"assumed: {model.assumed}", "dim")))


def _count(value: float) -> str:
    return f"{value:,.2f}" if value % 1 else format_count(value)


def _cost_model(model: Served | str) -> str:
    """Whether the figures that the engine reports agree with its model's config."""
    if isinstance(model, str):
        return f"unknown: {model}"
    name = model.architecture.model_type
    if not model.figures:
        return f"{name}; the engine reports nothing to compare it with"
    drift = model.drift()
    if drift is None:
        return f"{name}; matches the engine's figures"
    reported = f"{_count(drift.reported.nominal)} {drift.title}, predicted {_count(drift.predicted.nominal)}"
    reasons = (reason.text for reason in drift.reasons[:1])
    return ": ".join((name, f"{reported} ({signed(format_ratio(drift.drift_ratio))})", *reasons))


def _steps(steps: Iterable[StepResult]) -> RenderableType:
    rows = []
    for number, step in enumerate(steps, start=1):
        result = Text.assemble((f"{number} {step.id}: ", "bold"), plain(step.summary))
        for note in step.notes:
            result.append("\n").append(plain(note, "dim"))
        rows.append((status_word(step.status), result))
    return grid(rows)


def status_word(status: Status) -> Text:
    """A status as its word in its colour."""
    return Text(WORDS[status], style=STYLES[status])


def problem(finding: Finding) -> RenderableType:
    """A finding with its evidence, and what to do about it."""
    rows = [(status_word(finding.status), plain(finding.summary))]
    rows += [
        (Text(), Text.assemble(plain(f"{spaced(one.name)}: ", "dim"), plain(evidence_value(one))))
        for one in finding.evidence
    ]
    # The remedy is last: the prompt appears below it.
    for title, field in (*ADVICE[:2], ADVICE[3], ADVICE[2]):
        if text := getattr(finding, field):
            text = f"`kvdiag explain --runbook {finding.id}`" if field == "runbook" else text
            rows.append((Text(title.lower().removeprefix("likely "), style="bold"), plain(text)))
    return grid(rows)


def unknowns(findings: Iterable[Finding]) -> RenderableType:
    """Unknown verdicts, those with one reason together, the reason next to the first of them.

    A verdict that is listed several times, for several versions, has its reason each time.
    """
    grouped = unknown_by_reason(findings)
    times = Counter(chain.from_iterable(grouped.values()))
    return grid(
        (Text(name, style=STYLES["unknown"]), plain("as above", "dim") if place and times[name] == 1 else plain(reason))
        for reason, ids in grouped.items()
        for place, name in enumerate(ids)
    )


def ledger_table(lines: Iterable[LedgerLine]) -> RenderableType:
    """Ledger lines with their sizes, one a row."""
    table = columns("=", ">", "=", "", header=False)
    for line in lines:
        where = "" if line.gpu is None else f"GPU {line.gpu} "
        table.add_row(
            f"{where}{spaced(line.component)}", format_bytes(line.bytes), line.provenance, plain(line.detail, "dim")
        )
    return indented(table)


def gap_list(gaps: Iterable[Gap]) -> RenderableType:
    """Gaps with their reasons, one a row."""
    return grid((gap.source, gap.reason) for gap in gaps)
