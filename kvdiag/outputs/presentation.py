"""What terminal and HTML share: the order of findings, the verdict in one sentence, figures in their units. Pure.

The sentence is the line that everyone reads, so its order is fixed: since when the server is down, with the last
verdict; an earlier life that was worse; the present verdict. A verdict is given by the worst finding, else by the step
with that status, else by the reason why it is unknown. Nothing is judged here, and layout and colours are each
output's own. Texts from outside go through `printable`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvdiag.engine_memory import engine_title
from kvdiag.formatting import (
    format_bytes,
    format_duration,
    format_holder,
    format_number,
    format_p_value,
    format_rate,
    format_ratio,
    format_time,
    plural,
)

if TYPE_CHECKING:
    from kvdiag.model import Diagnosis, Evidence, Facts, Finding, KnownReport, KvPool, Life, Memory, Status

ORDER: tuple[Status, ...] = ("fault", "suspect", "unknown", "ok")
"""The worst first."""

WORDS: Mapping[Status, str] = {"ok": "OK", "suspect": "SUSPECT", "fault": "FAULT", "unknown": "UNKNOWN"}

OLD_SECONDS = 60.0
"""Age from which a finding says when it was last seen."""

NOT_REPORTED = "not reported"

ADVICE = (("Likely cause", "likely_cause"), ("Confirm", "confirm"), ("Remedy", "remedy"), ("Runbook", "runbook"))
"""The headings of a finding's advice and its fields, in the order in which they are read."""


def fixes(finding: Finding) -> list[tuple[str, str, str]]:
    """The computed changes in order of least harm: what each is, as it is typed, what it buys and costs.

    The first is the fix, unless it only makes the finding smaller; last what could not be computed, and why.
    """
    prescription = finding.prescription
    if prescription is None:
        return []
    first = prescription.first
    changes = [
        ("Fix" if one is first else "Or" if one.mends else "In part", one.change, f"{one.gain}; cost: {one.cost}")
        for one in prescription.changes
    ]
    return [*changes, *(("Unknown", one, "") for one in prescription.missing)]


MAX_REPORTS = 3
"""Known reports that are shown; the JSON document has all that match."""


def known_reports(finding: Finding) -> tuple[str, list[tuple[str, str, str]]]:
    """The line of the known reports that a finding matches, and of the first ones their name, link and content.

    Empty where there are none; the line alone where there are many and the server's version decides. A condition of
    which it is not known whether the server meets it is an "only if".
    """
    prescription = finding.prescription
    if prescription is None or prescription.known_issue is None:
        return "", []
    reports = prescription.known_reports
    undecided = len(reports) > MAX_REPORTS and all(one.version_affected is None for one in reports)
    shown = () if undecided else reports[:MAX_REPORTS]
    return prescription.known_issue, [(one.id, one.links[0], _report(one)) for one in shown]


def _report(one: KnownReport) -> str:
    applies = f" Only if {' and '.join(one.unknown)}." if one.unknown else ""
    version = "" if one.version_affected else f" Versions: {one.affected}."
    cause = "" if one.certainty == "confirmed" else " Cause not confirmed."
    return f"{one.summary}{applies}{version}{cause} {one.remedy}"


def confidence(finding: Finding) -> str:
    """How often such findings were right, as a word and its count; empty where that is not known."""
    known = finding.confidence
    if known is None:
        return ""
    return f"{known.word}: {format_ratio(known.ratio)} of {known.cases:,} such findings in tests were right"


def printable(text: str) -> str:
    """A text from outside without characters that move a cursor, reverse the line or are not valid in HTML."""
    if text.isascii() and text.isprintable():  # such as the path of a plot's line, of a hundred thousand characters
        return text
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    category = unicodedata.category(character)
    if category in {"Zl", "Zp"} or character in "\n\t":
        return " "
    # Control characters, formatting ones such as the bidirectional overrides, halves of surrogate pairs.
    return "\N{REPLACEMENT CHARACTER}" if category in {"Cc", "Cf", "Cs"} else character


def problems_of(findings: Iterable[Finding]) -> list[Finding]:
    """Faults and suspects, the worst first."""
    found = [finding for finding in findings if finding.status in ("fault", "suspect")]
    return sorted(found, key=lambda finding: ORDER.index(finding.status))


EXPLAINED, HEALTHY, UNKNOWN = "Explained", "Checked, not found", "Unknown"


def sections(diagnosis: Diagnosis) -> list[tuple[str, list[Finding]]]:
    """The findings that are no problem, in the order in which they are read, under their titles; none is empty."""
    passed = [one for one in diagnosis.findings if one.status == "ok"]
    explained = [one for one in passed if one.id.startswith("benign.") and one.evidence]
    healthy = [one for one in passed if one not in explained]
    unknown = unknown_of(diagnosis.findings)
    found = ((EXPLAINED, explained), (HEALTHY, healthy), (UNKNOWN, unknown))
    return [(title, findings) for title, findings in found if findings]


def unknown_of(findings: Sequence[Finding]) -> list[Finding]:
    """The unknown findings, but for those of which a problem's title speaks as well: growth that either may be."""
    named = {one.or_id for one in problems_of(findings)}
    return [one for one in findings if one.status == "unknown" and one.id not in named]


def unknown_by_reason(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """The ids of the unknown verdicts by their reason: what lacks the same thing stands together, each id once."""
    reasons: dict[str, dict[str, None]] = {}
    for one in findings:
        reasons.setdefault(one.summary, {})[one.id] = None
    return {reason: list(ids) for reason, ids in reasons.items()}


def headline(findings: Iterable[Finding]) -> str:
    """The worst finding in one sentence, with the number of further ones; empty if there is none."""
    problems = problems_of(findings)
    if not problems:
        return ""
    more = f" (and {plural(len(problems) - 1, 'more finding')})" if len(problems) > 1 else ""
    return f"{problems[0].title}: {problems[0].summary}{more}"


DOWN = "DOWN"
"""Stands in place of the status where the server no longer answers: the verdict below is as of its last answer."""

POSTMORTEM = "to find out why, run `kvdiag diagnose --postmortem LOG`"


def word(diagnosis: Diagnosis) -> str:
    """What a result begins with: its status, or that the server is down."""
    return WORDS[diagnosis.worst] if diagnosis.down_since_seconds is None else DOWN


def sentence(diagnosis: Diagnosis) -> str:
    """The verdict in one sentence: since when the server is down, the worst of its lives and when, the present one."""
    past, down_seconds = diagnosis.worst_past_life, diagnosis.down_since_seconds
    present, status = _sentence(diagnosis), diagnosis.present_worst
    parts = []
    if down_seconds is not None:
        parts.append(f"{since(down_seconds, diagnosis.lives[-1].end_detail)}; {POSTMORTEM}")
        parts.append(f"last verdict: {WORDS[status]}, {present}")
    if past is not None:
        server = f"the {_title(past.engine)} server" if _is_other(past, diagnosis) else "the server"
        when = f"before {server} stopped at {format_time(past.end_seconds or 0.0)}: {headline(past.findings)}"
        parts.append(when if not parts else f"{WORDS[past.worst]} {when}")
        if down_seconds is None:
            began = format_time(diagnosis.lives[-1].start_seconds)
            shown = "" if status == "ok" else f" ({present})"
            now = f"{_title(diagnosis.facts.engine_name)} started" if _is_other(past, diagnosis) else "it started again"
            parts.append(f"since {now} at {began}: {WORDS[status]}{shown}")
    elif down_seconds is None and (restarts := len(diagnosis.lives[1:])) > 1:  # a single one is an update
        planned = f"the server restarted {restarts} times; where that was not planned, {POSTMORTEM}"
        parts = [present, planned]
    return "; ".join(parts) or present


def since(down_seconds: float, reason: str | None) -> str:
    """Since when a server is down, and the reason: `since 2026-11-23T20:14:03Z (connection refused)`."""
    return f"since {format_time(down_seconds)}" + (f" ({reason})" if reason else "")


def life_rows(diagnosis: Diagnosis) -> list[tuple[Status, str, str]]:
    """Each life with its verdict, its time and how it ended; none where there is just the present one."""
    if len(diagnosis.lives) == 1 and diagnosis.down_since_seconds is None:
        return []
    names = [f"{_title(life.engine)}, " if _is_other(life, diagnosis) else "" for life in diagnosis.lives]
    times = [f"{name}{_time_of(life)}" for name, life in zip(names, diagnosis.lives, strict=True)]
    return [(life.worst, at, headline(life.findings)) for at, life in zip(times, diagnosis.lives, strict=True)]


def _time_of(life: Life) -> str:
    start = format_time(life.start_seconds)
    if life.end_seconds is None:
        return f"since {start}"
    how = life.end if life.end != "unreachable" or life.end_detail is None else life.end_detail
    detail = f": {life.end_detail}" if life.end == "exited" and life.end_detail else ""
    return f"{start} to {format_time(life.end_seconds)}, then {how}{detail}"


def time_span(finding: Finding, diagnosis: Diagnosis) -> str:
    """Since when a finding has been true, and when it last was, where that is not now; empty where neither is known."""
    last_seconds = finding.last_seen_seconds
    parts = [] if finding.since_seconds is None else [f"since {format_time(finding.since_seconds)}"]
    over = diagnosis.down_since_seconds is not None or finding not in diagnosis.findings
    if last_seconds is not None and (over or last_seconds < diagnosis.end_seconds - OLD_SECONDS):
        ended = "" if finding in diagnosis.findings else ", before a restart of the server"
        past = diagnosis.worst_past_life
        if ended and past is not None and finding in past.findings and _is_other(past, diagnosis):
            ended = f", of the {_title(past.engine)} server that was at this address before"
        parts.append(f"last seen {format_time(last_seconds)}{ended}")
    return ", ".join(parts)


def _title(engine: str | None) -> str:
    return engine_title(engine or "")


def _is_other(past: Life, diagnosis: Diagnosis) -> bool:
    """Whether another engine answers now than in an earlier life."""
    return None not in (past.engine, diagnosis.facts.engine_name) and past.engine != diagnosis.facts.engine_name


def problems_shown(diagnosis: Diagnosis) -> list[Finding]:
    """The suspects and faults to show: those of the last life, and of the earlier one that is worse."""
    past = diagnosis.worst_past_life
    return [*problems_of(diagnosis.findings), *(problems_of(past.findings) if past is not None else ())]


def _sentence(diagnosis: Diagnosis) -> str:
    """The verdict on the last life: the worst finding, else the step that failed or is unknown."""
    found = headline(diagnosis.findings)
    if found:
        return found
    step = next((step for step in diagnosis.steps if step.status == diagnosis.present_worst != "ok"), None)
    if step is not None:
        return f"step {step.id}: {step.summary}"
    if diagnosis.present_worst == "unknown":
        refused = [gap.reason for gap in diagnosis.gaps if (gap.source, gap.kind) == ("prometheus", "refused")]
        if refused:
            return refused[0]
        undecided = [one for one in diagnosis.findings if one.is_unexplained]
        reasons = unknown_by_reason(undecided or unknown_of(diagnosis.findings))
        missing = next(iter(reasons), "nothing was judged")  # in the order of the rules, causes first
        damage = {one.source: one.reason for one in reversed(diagnosis.gaps) if one.kind == "failed"}
        if "recorder" in damage and not undecided:
            return f"a part of the recording is lost: {damage['recorder']}"
        if "prometheus" in damage and not undecided:
            return damage["prometheus"]
        return missing if undecided or len(reasons) == 1 else f"not enough data for a verdict: {missing}"
    blind = "; device memory not observed" if all(part.gpu is None for part in diagnosis.ledger) else ""
    return f"no fault found{blind}"


def engine_of(facts: Facts) -> str:
    """The engine's name and version, as far as they are known."""
    return " ".join(part for part in (facts.engine_name, facts.engine_version) if part)


def memory_used(memory: Memory) -> str:
    """A device's memory in one line: `19.5 GiB of 24.0 GiB used (81 %), 4.54 GiB free`."""
    used, total = format_bytes(memory.used_bytes), format_bytes(memory.total_bytes)
    return f"{used} of {total} used ({format_ratio(memory.occupied_ratio)}), {format_bytes(memory.free_bytes)} free"


def pool_title(pool: KvPool, unit: str, size: tuple[int, str] | None) -> str:
    """A KV pool in its `unit`; `size` is bytes and provenance: `8,191 blocks of 16 tokens, 16.0 GiB reported`."""
    bytes_and_origin = "" if size is None else f", {format_bytes(size[0])} {size[1]}"
    of_tokens = "" if pool.block_tokens == 1 else f" of {pool.block_tokens} tokens"
    return f"{plural(pool.usable_blocks, unit)}{of_tokens}{bytes_and_origin}"


def spaced(name: str) -> str:
    """A name of ours as words: `torch_other` as `torch other`, `kv_pool` as `KV pool`, `kv_held` as `KV used`."""
    if name == "kv_held":
        return "KV used"
    return " ".join("KV" if word == "kv" else word for word in name.split("_"))


def evidence_value(evidence: Evidence) -> str:
    """The value of a piece of evidence, in its unit."""
    value, unit = evidence.value, evidence.unit
    if value is None:
        return NOT_REPORTED
    if isinstance(value, str):
        return format_holder(value) if unit == "holder" else value
    if unit == "bytes per hour":
        return format_rate(value)
    if unit.startswith("bytes"):
        return f"{format_bytes(value)}{unit.removeprefix('bytes')}"
    if unit == "ratio":
        return format_ratio(value)
    if unit == "p-value":
        return format_p_value(value)
    if unit in ("s", "seconds", "hours"):
        return format_duration(3600.0 * value if unit == "hours" else value)
    shown = format_number(value)
    if unit in ("times", "index") or unit in evidence.name.split("_"):
        return shown  # its label says what is counted
    return f"{shown} {_singular(unit) if shown == '1' else unit}".rstrip()


def _singular(unit: str) -> str:
    """The unit of one thing: `block per request` for `blocks per request`, `process` for `processes`; `ms` stays."""
    several, *per = unit.split(" ", 1)
    one = several if several == "ms" else several.removesuffix("es" if several.endswith(("sses", "ches")) else "s")
    return " ".join((one, *per))
