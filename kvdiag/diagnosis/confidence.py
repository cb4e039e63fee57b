"""How often a finding of one id and status was right where the truth is known: incidents and drawn servers.

confidence.json holds the counts, made by `python -m tests.quality.worlds.calibrate`: for each id and status, how many
findings were right, of how many. A count says nothing of a single server; it says how far such a finding can be relied
on. Fewer than `MIN_CASES` give no confidence.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources

from kvdiag.model import Confidence, ConfidenceWord, Finding, Status

MIN_CASES = 10
"""Findings without which their share says little: of ten that are all right, eight in ten are at least."""

DEVIATIONS = 1.645
"""Of the share, for its lower bound at 95 % (Wilson)."""

CERTAIN_RATIO, LIKELY_RATIO = 0.9, 0.6
"""Lower bounds of the share from which a finding is certain, and likely."""


def confidence_of(verdict: str, status: Status) -> Confidence | None:
    """How often findings of this id and status were right; `None` where that was compared too rarely."""
    right, cases = _counts().get(verdict, {}).get(status, (0, 0))
    if cases < MIN_CASES:
        return None
    low = low_ratio(right, cases)
    word: ConfidenceWord = "certain" if low >= CERTAIN_RATIO else "likely" if low >= LIKELY_RATIO else "possible"
    return Confidence(word=word, ratio=round(right / cases, 4), low_ratio=round(low, 4), cases=cases)


def with_confidence(finding: Finding) -> Finding:
    """The finding with the share of such findings that were right; `None` where it may be either of two verdicts."""
    confidence = None if finding.or_id else confidence_of(finding.id, finding.status)
    return replace(finding, confidence=confidence)


def low_ratio(right: int, cases: int) -> float:
    """What the share of right ones is at least, by Wilson's interval."""
    share, weight = right / cases, DEVIATIONS**2 / cases
    spread = DEVIATIONS * math.sqrt(share * (1.0 - share) / cases + weight / (4.0 * cases))
    return max((share + weight / 2.0 - spread) / (1.0 + weight), 0.0)


@cache
def _counts() -> Mapping[str, Mapping[str, tuple[int, int]]]:
    text = resources.files("kvdiag.diagnosis").joinpath("confidence.json").read_text(encoding="utf-8")
    return {
        verdict: {status: tuple(counts) for status, counts in row.items()} for verdict, row in json.loads(text).items()
    }
