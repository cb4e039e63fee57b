"""The diagnosis for a person at a terminal: verdict first, evidence next, remedy last. Readable at 80 columns.

Names and error texts come from servers and drivers: `plain` is the one door through which any of it gets in.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvdiag.kv.calibration.running_server import Served, pool_bytes, served
from kvdiag.model import Device, Diagnosis, Evidence, Facts, Finding, Gap, LedgerLine, Status, StepResult

STYLES: dict[Status, str] = {"ok": "green", "suspect": "yellow", "fault": "red", "unknown": "magenta"}
WORDS: dict[Status, str] = {"ok": "OK", "suspect": "SUSPECT", "fault": "FAULT", "unknown": "UNKNOWN"}
ORDER: tuple[Status, ...] = ("fault", "suspect", "unknown", "ok")


def render(diagnosis: Diagnosis) -> RenderableType:
    """The whole diagnosis."""
    parts: list[RenderableType] = [_headline(diagnosis), _subject(diagnosis.facts)]
    if diagnosis.steps:
        parts += [heading("Test steps"), _steps(diagnosis.steps)]
    for finding in problems_of(diagnosis.findings):
        parts += [heading(finding.id), problem(finding)]
    explained = explained_of(diagnosis)
    healthy = [one for one in diagnosis.findings if one.status == "ok" and one not in explained]
    unknown = [one for one in diagnosis.findings if one.status == "unknown"]
    if explained:
        parts += [heading("Explained"), _verdicts(explained)]
    if healthy:
        parts += [heading("Looked at and not found"), _verdicts(healthy)]
    if unknown:
        parts += [heading("Could not tell"), unknowns(unknown)]
    if diagnosis.ledger:
        parts += [heading("Where the memory is"), ledger_table(diagnosis.ledger)]
    if diagnosis.gaps:
        parts += [heading("Not seen"), gap_list(diagnosis.gaps)]
    return Group(*parts)


def render_audit(
    facts: Facts, devices: Sequence[Device], lines: tuple[LedgerLine, ...], gaps: tuple[Gap, ...]
) -> RenderableType:
    """The memory audit alone."""
    parts: list[RenderableType] = [_subject(facts)]
    for device in devices:
        memory = device.memory
        state = (
            "memory cannot be read"
            if memory is None
            else f"{readable(memory.used_bytes)} used of {readable(memory.total_bytes)}, "
            f"{readable(memory.free_bytes)} free ({memory.occupied_ratio:.0%} taken)"
        )
        parts += [heading(f"GPU {device.index}  {device.name}"), plain(f"  {state}")]
        own = tuple(line for line in lines if line.uuid == device.uuid)
        if own:
            parts.append(ledger_table(own))
    models = [model for pool in facts.pools if isinstance(model := served(facts, pool), Served) and model.figures]
    for model in dict.fromkeys(models):
        parts += [heading("KV pool by the model's config, and as the engine reports it"), _figures(model)]
    pool = tuple(line for line in lines if line.gpu is None)
    if pool:
        parts += [heading("KV pool, as the engine reports it (no device was seen)"), ledger_table(pool)]
    if gaps:
        parts += [heading("Not seen"), gap_list(gaps)]
    return Group(*parts)


def _headline(diagnosis: Diagnosis) -> Text:
    return Text.assemble((WORDS[diagnosis.worst], f"bold {STYLES[diagnosis.worst]}"), "  ", plain(sentence(diagnosis)))


def problems_of(findings: Iterable[Finding]) -> list[Finding]:
    """Those that accuse, the worst first."""
    found = [finding for finding in findings if finding.status in ("fault", "suspect")]
    return sorted(found, key=lambda finding: ORDER.index(finding.status))


def explained_of(diagnosis: Diagnosis) -> list[Finding]:
    """The findings that explain growth which is no fault."""
    return [one for one in diagnosis.findings if one.id.startswith("benign.") and one.status == "ok" and one.evidence]


def sentence(diagnosis: Diagnosis) -> str:
    """The verdict in a sentence: the worst finding, or the step that accuses or could not be told."""
    problems = problems_of(diagnosis.findings)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"{problems[0].id}: {problems[0].summary}{more}"
    step = next((step for step in diagnosis.steps if step.status == diagnosis.worst != "ok"), None)
    if step is not None:
        return f"step {step.id}: {step.summary}"
    if diagnosis.worst == "unknown":
        return "not enough was seen to judge"
    unseen = "; device memory was not seen" if all(part.gpu is None for part in diagnosis.ledger) else ""
    return f"no fault found in what could be seen{unseen}"


def _subject(facts: Facts) -> RenderableType:
    engine = " ".join(part for part in (facts.engine_name, facts.engine_version) if part)
    pools = ", ".join(
        f"{pool.usable_blocks:,} blocks of {pool.block_tokens} tokens"
        + ("" if (size := pool_bytes(facts, pool)) is None else f" ({readable(size[0])})")
        for pool in facts.pools
    )
    models = dict.fromkeys(_cost_model(served(facts, pool)) for pool in facts.pools)
    rows = [
        ("server", " ".join(part for part in (facts.url, f"({engine})" if engine else None) if part) or "not told"),
        ("model", facts.model or "not told"),
        ("KV pool", pools or "not told"),
        *(("KV model", told) for told in models),
    ]
    table = grid()
    for name, value in rows:
        table.add_row(Text(name, style="dim"), plain(value))
    return table


def _figures(model: Served) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    table.add_column(no_wrap=True)
    for title in ("predicted", "reported", "drift"):
        table.add_column(title, justify="right", no_wrap=True)
    for figure in model.figures:
        drift = f"{figure.drift_ratio:+.2%}" if figure.drift_ratio else "exact"
        numbers = (_count(figure.predicted.nominal), _count(figure.reported.nominal), drift)
        table.add_row(figure.title, *numbers)
    return Padding(Group(table, plain(f"assumed: {model.assumed}", "dim")), (0, 0, 0, 2))


def _count(value: float) -> str:
    return f"{value:,.2f}" if value % 1 else f"{value:,.0f}"


def _cost_model(model: Served | str) -> str:
    """Whether the engine's own figures are what its model's config gives."""
    if isinstance(model, str):
        return f"not known: {model}"
    name = model.architecture.model_type
    if not model.figures:
        return f"{name}; the engine reports nothing to compare it with"
    drift = model.drift()
    if drift is None:
        return f"{name}; its config gives what the engine reports"
    told = f"{_count(drift.reported.nominal)} {drift.title}, predicted {_count(drift.predicted.nominal)}"
    return ": ".join((name, f"{told} ({drift.drift_ratio:+.1%})", *drift.reasons[:1]))


def _steps(steps: Iterable[StepResult]) -> RenderableType:
    table = grid()
    for number, step in enumerate(steps, start=1):
        told = Text.assemble((f"{number} {step.id}: ", "bold"), plain(step.summary))
        for note in step.notes:
            told.append("\n").append(plain(note, "dim"))
        table.add_row(Text(WORDS[step.status], style=STYLES[step.status]), told)
    return table


def problem(finding: Finding) -> RenderableType:
    """A finding with its evidence, and what to do about it."""
    table = grid()
    table.add_row(Text(WORDS[finding.status], style=STYLES[finding.status]), plain(finding.summary))
    for one in finding.evidence:
        table.add_row(
            Text(""), Text.assemble(plain(f"{one.name.replace('_', ' ')}: ", "dim"), plain(evidence_value(one)))
        )
    for name, text in (
        ("cause", finding.likely_cause),
        ("confirm", finding.confirm),
        ("runbook", finding.runbook),
        ("remedy", finding.remedy),
    ):
        if text:
            table.add_row(Text(name, style="bold"), plain(text))
    return table


def evidence_value(evidence: Evidence) -> str:
    """What a piece of evidence says, with its unit."""
    value = evidence.value
    if value is None:
        return "not known"
    if isinstance(value, str):
        return value
    if evidence.unit.startswith("bytes"):
        return f"{readable(value)}{evidence.unit.removeprefix('bytes')}"
    if evidence.unit == "ratio":
        return f"{value:.1%}"
    if evidence.unit == "index":
        return f"{value:.0f}"
    shown = f"{value:,.4g}" if value % 1 else f"{value:,.0f}"
    return f"{shown} {_singular(evidence.unit) if shown == '1' else evidence.unit}".rstrip()


def _singular(unit: str) -> str:
    """What there is one of: `block per request` of `blocks per request`, `stretch` of `stretches`; `ms` stays."""
    several, *per = unit.split(" ", 1)
    one = several if several == "ms" else several.removesuffix("es" if several.endswith(("sses", "ches")) else "s")
    return " ".join((one, *per))


def _verdicts(findings: Iterable[Finding]) -> RenderableType:
    table = grid()
    for finding in findings:
        summary = finding.summary.removeprefix("cannot tell: ")
        table.add_row(Text(finding.id, style=STYLES[finding.status]), plain(summary))
    return table


def unknowns(findings: Iterable[Finding]) -> RenderableType:
    """Findings that could not be told, those with one reason together, the reason beside the first of them."""
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        reasons.setdefault(finding.summary.removeprefix("cannot tell: "), []).append(finding.id)
    table = grid()
    for reason, ids in reasons.items():
        for place, name in enumerate(ids):
            told = plain("the same", "dim") if place else plain(reason)
            table.add_row(Text(name, style=STYLES["unknown"]), told)
    return table


def ledger_table(lines: Iterable[LedgerLine]) -> RenderableType:
    """Ledger lines with their sizes, one a row."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        where = "" if line.gpu is None else f"GPU {line.gpu} "
        table.add_row(f"{where}{line.component}", readable(line.bytes), line.source, plain(line.detail, "dim"))
    return Padding(table, (0, 0, 0, 2))


def gap_list(gaps: Iterable[Gap]) -> RenderableType:
    """Gaps with their reasons, one a row."""
    table = grid()
    for gap in gaps:
        table.add_row(plain(gap.source, "dim"), plain(f"{gap.kind}: {gap.reason}"))
    return table


def readable(value: float) -> str:
    """Bytes as GiB or MiB with two decimals."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    for unit, divisor, smaller_places in (("GiB", 2**30, 2), ("MiB", 2**20, 2), ("KiB", 2**10, 0)):
        # What would be rounded to 1024 of the smaller unit is one of this.
        if round(1024 * size / divisor, smaller_places) >= 1024:  # noqa: PLR2004
            return f"{sign}{size / divisor:,.2f} {unit}"
    return f"{sign}{size:.0f} B"


def heading(text: str) -> RenderableType:
    """The line above a part, after an empty one."""
    return Padding(plain(text, "bold"), (1, 0, 0, 0))


def plain(content: str, style: str = "") -> Text:
    """Text as it may stand on a terminal: no markup, and no character that moves a cursor or turns the line round."""
    return Text("".join(map(_harmless, content)), style=style)


def _harmless(character: str) -> str:
    category = unicodedata.category(character)
    if category in {"Zl", "Zp"} or character in "\n\t":
        return " "
    # Control characters, formatting ones such as the bidirectional overrides, halves of surrogate pairs.
    return "\N{REPLACEMENT CHARACTER}" if category in {"Cc", "Cf", "Cs"} else character


def grid() -> Table:
    """A table of a name and what is told of it."""
    table = Table(box=None, padding=(0, 0, 0, 2), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table
