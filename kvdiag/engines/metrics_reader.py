"""Reads an engine's gauges and counters from its metrics endpoint by a table of names, for every engine. Pure.

The page is first split into its engines (`split_by_engine`): one for each value of a label, such as the data-parallel
rank. `Figures` then reads one engine's series. A figure that is missing is `None`; one outside its range, or reported
several times, is `None` with a gap. What an engine's names mean is the engine's own.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvdiag.engines.engine import SOURCE
from kvdiag.model import MAX_COUNT, Gap, Lengths
from kvdiag.sources.prometheus_names import Meaning
from kvdiag.sources.prometheus_text import Page, Series

CHECK = "run `kvdiag doctor`"

MAX_SERIES = 512
"""Of one name that is read. vLLM 0.32 has three of a name for each engine; 170 engines are more than one server has."""

MAX_LABEL_CHARACTERS = 64
"""Of an engine's label, which is a number: it stands in every sample and gap."""

MAX_GAPS = 32
"""Of one page."""

MAX_BUCKETS = 4096
"""vLLM 0.32 has fifteen for each engine and model name."""


def split_by_engine(
    page: Page, names: Iterable[str], *, absent: str, label: Callable[[Series], str] = lambda line: line.engine
) -> Mapping[str, Page] | Gap:
    """The series of these names for each engine, in the order of the engines' labels, or why there are none.

    `absent` is the reason for a page without any of the names.
    """
    names = tuple(names)
    if (crowd := crowded(page, names)) is not None:
        return crowd
    # By engine at once: to look through all lines for each of them takes seconds of the event loop.
    pages: dict[str, dict[str, tuple[Series, ...]]] = {}
    for name in names:
        for line in page.get(name, ()):
            own = pages.setdefault(label(line), {})
            own[name] = (*own.get(name, ()), line)
    if len(pages) > MAX_SERIES:
        return Gap(SOURCE, "refused", f"{len(pages)} engines, more than {MAX_SERIES}: not one server's metrics")
    if not pages:
        return Gap(SOURCE, "absent", absent)
    if max(map(len, pages)) > MAX_LABEL_CHARACTERS:
        reason = f"an engine's label has more than {MAX_LABEL_CHARACTERS} characters: not one server's metrics"
        return Gap(SOURCE, "refused", reason)
    return {name: pages[name] for name in sorted(pages, key=_by_number)}


def _by_number(label: str) -> tuple[int, str]:
    return (int(label) if label.isdecimal() and len(label) < len(str(MAX_COUNT)) else MAX_COUNT, label)


def crowded(page: Page, names: Iterable[str]) -> Gap | None:
    """The refusal of a page that has more series of a name than one server."""
    for name in names:
        if (count := len(page.get(name, ()))) > MAX_SERIES:
            reason = f"{name} has {count} series, more than {MAX_SERIES}: not one server's metrics"
            return Gap(SOURCE, "refused", reason)
    return None


class Figures:
    """One engine's figures; the gaps of all that cannot be used are added to `gaps`."""

    def __init__(self, page: Page, engine: str, gaps: list[Gap]) -> None:
        """Read the series of `page`, all of which are of the engine with this label."""
        self._page = page
        self._engine = engine
        self._gaps = gaps

    def value(self, names: Sequence[str], **labels: str) -> float | None:
        """The value of the series with these labels, under the first name that is present."""
        for name in names:
            lines = [line for line in self._page.get(name, ()) if labels.items() <= line.labels.items()]
            if len(lines) > 1:
                self._gaps.append(repeated(name, len(lines), self._engine))
                return None
            if lines:
                return lines[0].value
        return None

    def count(self, names: Sequence[str], **labels: str) -> int | None:
        """A whole number; a fraction, as of several processes' mean, is rounded."""
        value = self.value(names, **labels)
        if value is None or 0 <= value <= MAX_COUNT:
            return None if value is None else round(value)
        self.refuse(names[0], value)
        return None

    def ratio(self, title: str, names: Sequence[str], **labels: str) -> float | None:
        """A share, 0 to 1."""
        value = self.value(names, **labels)
        if value is None or 0.0 <= value <= 1.0:
            return value
        self.refuse(title, value)
        return None

    def counts(self, table: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """The counts of a table of fields and their names."""
        return {field: self.count(names) for field, names in table.items()}

    def refuse(self, name: str, value: float) -> None:
        """Add the gap of an impossible value."""
        reason = f"{name} of engine {self._engine} is {value:g}: not a possible value; {CHECK}"
        self._gaps.append(Gap(SOURCE, "failed", reason))


def with_prompts_as_queries(counts: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of an engine that reports cached prompt tokens: each prompt was looked up in its cache as a whole."""
    hits, prompts = counts["prefix_hits_total"], counts["prompt_tokens_total"]
    if hits is None or prompts is None or hits > prompts:
        return {**counts, "prefix_queries_total": None, "prefix_hits_total": None}
    return {**counts, "prefix_queries_total": prompts}


def repeated(name: str, count: int, engine: str) -> Gap:
    """The gap of a series that one server reports once."""
    why = "does this endpoint merge several servers?"
    return Gap(SOURCE, "failed", f"{name} appears {count} times for engine {engine[:MAX_LABEL_CHARACTERS]}: {why}")


def meanings(table: Mapping[str, Sequence[str]]) -> dict[str, Meaning]:
    """The names in Prometheus of a table of an engine's fields, of which the first name counts most."""
    return {
        name: Meaning(part="engine", field=field, priority=at)
        for field, names in table.items()
        for at, name in enumerate(names)
    }


def parse_version(version: str | None) -> tuple[int, int, int] | None:
    """Major, minor and patch of a version such as "0.10.2+cu128" or "0.8.5.post2"; `None` where it has none."""
    found = re.match(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", version or "")
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def lengths_of(page: Page, buckets: str, prompts: tuple[str, str]) -> Lengths | None:
    """The lengths of all engines' finished requests together; `None` if none or impossible ones are reported.

    `buckets` are those of the histogram of generated tokens, `prompts` the sum and the count of the prompts' tokens.
    """
    lines = page.get(buckets, ())
    if not lines or len(lines) > MAX_BUCKETS:
        return None
    below: dict[float, float] = defaultdict(float)
    try:
        for line in lines:
            below[float(line.labels.get("le", ""))] += line.value
        uppers = tuple(sorted(below))
        so_far = [round(below[upper]) for upper in uppers]
        counts = tuple(here - before for before, here in zip([0, *so_far], so_far, strict=False))
        total, requests = (sum(line.value for line in page.get(name, ())) for name in prompts)
        mean = total / requests if requests > 0 else math.nan
        return Lengths(upper_tokens=uppers, counts=counts, mean_prompt_tokens=mean if 0.0 < mean <= MAX_COUNT else None)
    except (ValueError, OverflowError):
        # Invalid bounds or counts.
        return None
