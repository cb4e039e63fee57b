"""The diagnosis for a person at a terminal: verdict first, evidence next, remedy and fix last. Readable at 80 columns.

In this order: verdict and server, its lives, the test steps, each problem with evidence and remedy, what was explained,
what was checked, what is unknown and why, the memory ledger, missing data: the first screen is enough to act on, and
what follows supports it. Nothing is judged here. Names and error texts come from servers and drivers: `cells.plain` is
the only way any of them reaches the screen.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from rich.console import Group, RenderableType
from rich.text import Text

from kvdiag.engine_memory import modelled_engines
from kvdiag.formatting import format_bytes, format_number, format_ratio, signed
from kvdiag.kv.calibration.running_server import block_bytes, pool_bytes, served
from kvdiag.kv.calibration.served_layout import Served
from kvdiag.model import BlockOwners, Device, Diagnosis, Facts, Finding, Gap, KvPool, LedgerLine, Status, StepResult
from kvdiag.outputs.pool_owners import owner_rows, owners_title, request_notes
from kvdiag.outputs.presentation import (
    ADVICE,
    NOT_REPORTED,
    UNKNOWN,
    WORDS,
    confidence,
    engine_of,
    evidence_value,
    fixes,
    known_reports,
    life_rows,
    memory_used,
    pool_title,
    problems_shown,
    sections,
    sentence,
    spaced,
    time_span,
    unknown_by_reason,
    word,
)
from kvdiag.outputs.profile_words import TITLE
from kvdiag.outputs.terminal.cells import columns, grid, heading, indented, plain
from kvdiag.outputs.terminal.profile_text import render_profiles

STYLES: dict[Status, str] = {"ok": "green", "suspect": "yellow", "fault": "red", "unknown": "magenta"}


def render(diagnosis: Diagnosis) -> RenderableType:
    """The whole diagnosis, at any width."""
    parts: list[RenderableType] = [
        headed(diagnosis.worst, sentence(diagnosis), word(diagnosis)),
        _subject(diagnosis.facts, sampled=bool(diagnosis.samples)),
    ]
    if lives := life_rows(diagnosis):
        rows = [(status_word(life), Text("\n").join(map(plain, filter(None, texts)))) for life, *texts in lives]
        parts += [heading("Server history, one line per start"), grid(rows)]
    if diagnosis.steps:
        parts += [heading("Test steps"), _steps(diagnosis.steps)]
    for finding in problems_shown(diagnosis):
        parts += [heading(finding.title), problem(finding, time_span(finding, diagnosis))]
    if diagnosis.profiles:
        parts += [heading(TITLE), indented(render_profiles(diagnosis.profiles))]
    for title, findings in sections(diagnosis):
        verdicts = grid((Text(one.id, style=STYLES[one.status]), one.summary) for one in findings)
        parts += [heading(title), unknowns(findings) if title == UNKNOWN else verdicts]
    if diagnosis.ledger:
        parts += [heading("Memory ledger"), ledger_table(diagnosis.ledger)]
    parts += _owners(diagnosis.block_owners, diagnosis.facts)
    if diagnosis.gaps:
        parts += [heading("Missing data"), gap_list(diagnosis.gaps)]
    return Group(*parts)


def render_audit(
    facts: Facts,
    devices: Sequence[Device],
    lines: tuple[LedgerLine, ...],
    gaps: tuple[Gap, ...],
    owners: Sequence[BlockOwners] = (),
) -> RenderableType:
    """The memory audit alone."""
    parts: list[RenderableType] = [_subject(facts)]
    alike: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        state = "memory cannot be read" if device.memory is None else memory_used(device.memory)
        alike.setdefault((device.name, state), []).append(device)
    for (name, state), group in alike.items():
        which = ", ".join(f"{device.index}" for device in group)
        parts += [heading(f"GPU {which}  {name}"), plain(f"  {'each: ' if len(group) > 1 else ''}{state}")]
        uuids = {device.uuid for device in group}
        if own := tuple(line for line in lines if line.uuid in uuids):
            parts.append(ledger_table(own))
    models = [model for pool in facts.pools if not isinstance(model := served(facts, pool), str) and model.figures]
    for model in dict.fromkeys(models):
        parts += [
            heading("KV pool: predicted from the model's config, and reported by the engine"),
            _figures(model, facts),
        ]
    pool = tuple(line for line in lines if line.gpu is None)
    if pool:
        parts += [heading("KV pool, as reported by the engine (no GPU was observed)"), ledger_table(pool)]
    parts += _owners(owners, facts)
    if gaps:
        parts += [heading("Missing data"), gap_list(gaps)]
    return Group(*parts)


def headed(status: Status, text: str, shown: str = "") -> Text:
    """The first line of a result: its status, or what is `shown` in its place, and its verdict."""
    return Text.assemble((shown or WORDS[status], f"bold {STYLES[status]}"), "  ", plain(text))


def _subject(facts: Facts, *, sampled: bool = True) -> RenderableType:
    """The server, its model and its pool; of a crash without samples only what its artifacts show."""
    engine = engine_of(facts)
    pools = "; ".join(pool_title(pool, facts.capabilities.unit, pool_bytes(facts, pool)) for pool in facts.pools)
    models = dict.fromkeys(_cost(facts, pool) for pool in facts.pools)
    rows = [
        ("server", f"{facts.url} ({engine})" if facts.url and engine else facts.url or engine or NOT_REPORTED),
        ("model", facts.model or NOT_REPORTED),
        ("KV pool", pools or NOT_REPORTED),
        *(("KV cost", model) for model in models),
    ]
    return grid(row for row in rows if sampled or row[1] != NOT_REPORTED)


def _figures(model: Served, facts: Facts) -> RenderableType:
    table, unit = columns("=", ">predicted", ">reported", ">difference"), facts.capabilities.unit
    for figure in model.figures:
        drift = signed(format_ratio(figure.drift_ratio)) if figure.drift_ratio else "exact"
        sizes = (format_number(one.nominal) for one in (figure.predicted, figure.reported))
        table.add_row(figure.figure.phrase.replace("block", unit), *sizes, drift)
    # vLLM's settings, which change nothing of another engine's pool.
    assumed = [plain(f"assumed: {model.assumed}", "dim")] if facts.engine_name in modelled_engines() else []
    return indented(Group(table, *assumed))


def _cost(facts: Facts, pool: KvPool) -> str:
    """What a block costs: by the model's config, or by what the engine's own arithmetic makes of the pool."""
    if pool.mixed:
        return f"differs with the context: windows or states are cached besides {facts.capabilities.unit}s"
    model, size = served(facts, pool), block_bytes(facts, pool)
    if size is None or not pool.bytes_computed:
        return _cost_model(model, facts.capabilities.unit)
    return f"{format_bytes(size[0])} per {facts.capabilities.unit}, {size[1]}"


def _cost_model(model: Served | str, unit: str) -> str:
    """Whether the figures that the engine reports agree with its model's config."""
    if isinstance(model, str):
        return f"unknown: {model}"
    name, size = model.architecture.model_type, f"bytes per {unit} unknown"
    if model.block_bytes is not None:
        size = f"{format_bytes(model.block_bytes)} per {unit}"
    if not model.figures:
        return f"{size}; the engine reports nothing to compare with kvdiag's calculation ({name})"
    drift = model.drift()
    if drift is None:
        labels = ", ".join(one.figure.label for one in model.figures).replace("block", unit)
        return f"{size}; reported {labels} match kvdiag's calculation ({name})"
    predicted, reported = (format_number(one.nominal) for one in (drift.predicted, drift.reported))
    what = drift.figure.phrase.replace("block", unit)
    figures = f"{reported} {what}, predicted {predicted} ({signed(format_ratio(drift.drift_ratio))})"
    return ": ".join((name, figures, *(reason.text for reason in drift.reasons[:1])))


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


def problem(finding: Finding, when: str = "") -> RenderableType:
    """A finding with when it was observed, its evidence, and what to do about it."""
    rows = [(status_word(finding.status), plain(finding.summary))]
    rows += [(Text(), plain(line, "dim")) for line in (confidence(finding), when) if line]
    rows += [
        (Text(), Text.assemble(plain(f"{spaced(one.name)}: ", "dim"), plain(evidence_value(one))))
        for one in finding.evidence
        if one.value is not None
    ]
    issue, reports = known_reports(finding)
    if issue:
        rows.append((Text("known", style="bold"), plain(issue)))
    for name, _, content in reports:
        rows.append((Text(), Text.assemble(plain(name, "bold"), plain(f": {content}", "dim"))))
    # Remedy and fix are last: the prompt appears below them.
    for title, field in (*ADVICE[:2], ADVICE[3], ADVICE[2]):
        if text := getattr(finding, field):
            text = f"`kvdiag explain --runbook {finding.id}`" if field == "runbook" else text
            rows.append((Text(title.lower().removeprefix("likely "), style="bold"), plain(text)))
    for title, change, effect in fixes(finding):
        shown = Text.assemble(plain(change, "bold"), plain(f": {effect}")) if effect else plain(change, "dim")
        rows.append((Text(title.lower(), style="bold"), shown))
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
    """Ledger lines with their sizes, one a row; GPUs that would read alike, such as equal ranks, share their rows."""
    devices: dict[str | None, list[LedgerLine]] = {}
    for line in lines:
        devices.setdefault(line.uuid, []).append(line)
    # Details name process ids, which are each rank's own.
    alike: dict[tuple[tuple[str, ...], ...], list[list[LedgerLine]]] = {}
    for own in devices.values():
        shown = tuple((line.component, format_bytes(line.bytes), line.provenance) for line in own)
        alike.setdefault(shown, []).append(own)
    table = columns("=", ">", "=", "", header=False)
    for group in alike.values():
        for line in group[0]:
            where, detail = "" if line.gpu is None else f"GPU {line.gpu} ", line.detail
            if len(group) > 1:
                where, detail = f"{len(group)} GPUs, each: ", re.split(r" of pid | \(pid ", detail)[0]
            name = f"{where}{spaced(line.component)}"
            table.add_row(name, format_bytes(line.bytes), line.provenance, plain(detail, "dim"))
    return indented(table)


def _owners(owners: Sequence[BlockOwners], facts: Facts) -> list[RenderableType]:
    """Who has the blocks of the KV pools, where the agent counts them."""
    if not owners:
        return []
    table = columns("=", ">", ">", ">", header=False)
    for one in owner_rows(owners, facts):
        table.add_row(plain(one.name, "red" if one.owner == "orphaned" else ""), one.blocks, one.size, one.share)
    notes = [plain(one, "dim") for one in request_notes(owners, facts)]
    return [heading(owners_title(owners)), indented(Group(table, *notes))]


def gap_list(gaps: Iterable[Gap]) -> RenderableType:
    """Gaps with their reasons, one a row."""
    return grid((gap.source, gap.reason) for gap in gaps)
