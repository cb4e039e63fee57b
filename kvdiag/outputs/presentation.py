"""What terminal and HTML share: the order of findings, the verdict in one sentence, figures in their units. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kvdiag.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_holder,
    format_p_value,
    format_rate,
    format_ratio,
    plural,
)

if TYPE_CHECKING:
    from kvdiag.model import Diagnosis, Evidence, Facts, Finding, KvPool, Memory, Status

ORDER: tuple[Status, ...] = ("fault", "suspect", "unknown", "ok")
"""The worst first."""

WORDS: Mapping[Status, str] = {"ok": "OK", "suspect": "SUSPECT", "fault": "FAULT", "unknown": "UNKNOWN"}

NOT_REPORTED = "not reported"

ADVICE = (("Likely cause", "likely_cause"), ("Confirm", "confirm"), ("Remedy", "remedy"), ("Runbook", "runbook"))
"""The headings of a finding's advice and its fields, in the order in which they are read."""


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


def explained_of(diagnosis: Diagnosis) -> list[Finding]:
    """The findings that explain growth which is no fault."""
    return [one for one in diagnosis.findings if one.id.startswith("benign.") and one.status == "ok" and one.evidence]


EXPLAINED, HEALTHY, UNKNOWN = "Explained", "Checked, not found", "Unknown"


def sections(diagnosis: Diagnosis) -> list[tuple[str, list[Finding]]]:
    """The findings that are no problem, in the order in which they are read, under their titles; none is empty."""
    explained = explained_of(diagnosis)
    healthy = [one for one in diagnosis.findings if one.status == "ok" and one not in explained]
    unknown = [one for one in diagnosis.findings if one.status == "unknown"]
    found = ((EXPLAINED, explained), (HEALTHY, healthy), (UNKNOWN, unknown))
    return [(title, findings) for title, findings in found if findings]


def unknown_by_reason(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """The ids of the unknown verdicts by their reason: what lacks the same thing stands together."""
    reasons: dict[str, list[str]] = {}
    for one in findings:
        if one.status == "unknown":
            reasons.setdefault(one.summary, []).append(one.id)
    return reasons


def headline(findings: Iterable[Finding]) -> str:
    """The worst finding in one sentence, with the number of further ones; empty if there is none."""
    problems = problems_of(findings)
    if not problems:
        return ""
    more = f" (and {plural(len(problems) - 1, 'more finding')})" if len(problems) > 1 else ""
    return f"{problems[0].id}: {problems[0].summary}{more}"


def sentence(diagnosis: Diagnosis) -> str:
    """The verdict in one sentence: the worst finding, else the step that failed or is unknown."""
    found = headline(diagnosis.findings)
    if found:
        return found
    step = next((step for step in diagnosis.steps if step.status == diagnosis.worst != "ok"), None)
    if step is not None:
        return f"step {step.id}: {step.summary}"
    if diagnosis.worst == "unknown":
        reasons = unknown_by_reason(diagnosis.findings)
        if len(reasons) == 1:
            return next(iter(reasons))
        return "not enough data for a verdict; the unknown checks list what is missing"
    blind = "; device memory not observed" if all(part.gpu is None for part in diagnosis.ledger) else ""
    return f"no fault found{blind}"


def engine_of(facts: Facts) -> str:
    """The engine's name and version, as far as they are known."""
    return " ".join(part for part in (facts.engine_name, facts.engine_version) if part)


def memory_used(memory: Memory) -> str:
    """A device's memory in one line: `19.5 GiB of 24.0 GiB used (81 %), 4.54 GiB free`."""
    used, total = format_bytes(memory.used_bytes), format_bytes(memory.total_bytes)
    return f"{used} of {total} used ({format_ratio(memory.occupied_ratio)}), {format_bytes(memory.free_bytes)} free"


def pool_title(pool: KvPool, size: tuple[int, str] | None) -> str:
    """A KV pool, `size` its bytes and their provenance if known: `8,191 blocks of 16 tokens, 16.0 GiB reported`."""
    bytes_and_origin = "" if size is None else f", {format_bytes(size[0])} {size[1]}"
    return f"{plural(pool.usable_blocks, 'block')} of {pool.block_tokens} tokens{bytes_and_origin}"


def spaced(name: str) -> str:
    """A name of ours as words: `torch_other` as `torch other`, `kv_pool` as `KV pool`."""
    return " ".join("KV" if word == "kv" else word for word in name.split("_"))


def signed(text: str) -> str:
    """A formatted figure with its sign: `+6.00 GiB`."""
    return text if text.startswith(("-", "<", ">")) else f"+{text}"


def evidence_value(evidence: Evidence) -> str:
    """The value of a piece of evidence, in its unit."""
    value, unit = evidence.value, evidence.unit
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return format_holder(value) if evidence.name in ("process", "holder") else value
    if unit in ("bytes per hour", "bytes/hour", "bytes/h"):
        return format_rate(value)
    if unit.startswith("bytes"):
        return f"{format_bytes(value)}{unit.removeprefix('bytes')}"
    if unit == "ratio":
        return format_ratio(value)
    if unit == "p-value":
        return format_p_value(value)
    if unit in ("s", "seconds"):
        return format_duration(value)
    if unit == "index":
        return f"{value:.0f}"
    shown = f"{value:,.4g}" if value % 1 else format_count(value)
    if unit == "times" or unit in evidence.name.split("_"):
        return shown  # the label beside it says what is counted
    return f"{shown} {_singular(unit) if shown == '1' else unit}".rstrip()


def _singular(unit: str) -> str:
    """The unit of one thing: `block per request` for `blocks per request`, `process` for `processes`; `ms` stays."""
    several, *per = unit.split(" ", 1)
    one = several if several == "ms" else several.removesuffix("es" if several.endswith(("sses", "ches")) else "s")
    return " ".join((one, *per))
