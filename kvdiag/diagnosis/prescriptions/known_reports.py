"""The public reports of engines' memory defects: what each says, and in which versions. Pure but for its data.

Those of one engine stand in engines/NAME/known_reports.json, those of libraries that several engines use in
library_reports.json here. Facts come from the linked threads and from the source of the releases; the words are
kvdiag's own. What is not known is left out. `tests/unit/diagnosis/prescriptions/test_known_reports.py` checks the data.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from kvdiag.engine_data import engine_data
from kvdiag.model.codec import from_plain
from kvdiag.model.verdicts import Certainty

FILE = "known_reports.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One defect: the verdicts that it causes, the versions that have it, what it takes, and what helps.

    `engines` have it. `first` and `last` are the oldest and the newest release that is known to have it, `fixed_in` the
    first one that has not; where the report names no version they are left out. `processes` are those whose memory
    grows, `without` conditions under which it does not appear. `bytes_per_request` are the least and the most that the
    report gives, `log` is found in the log of a server that has the defect.
    """

    id: str
    verdicts: tuple[str, ...]
    summary: str
    remedy: str
    links: tuple[str, ...]
    certainty: Certainty
    engines: tuple[str, ...] = ()
    first: str | None = None
    last: str | None = None
    fixed_in: str | None = None
    processes: tuple[str, ...] = ()
    connectors: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    bytes_per_request: tuple[int, ...] = ()
    log: str | None = None

    @property
    def has_versions(self) -> bool:
        """Whether any version of the engine is known to have the defect, or not to have it."""
        return not self.first == self.last == self.fixed_in is None

    @property
    def affected(self) -> str:
        """The versions that have it, in words."""
        until = f"before {self.fixed_in}" if self.fixed_in else f"fix not known, reported up to {self.last}"
        if not self.has_versions:
            return "not reported"
        if self.fixed_in is None and self.first == self.last:
            return f"reported for {self.last}; fix not known"
        return f"{self.first} and newer, {until}" if self.first else until


@cache
def vocabulary() -> dict[str, Any]:
    """The names in reports: conditions to their words, processes to their words and how their names are recognised."""
    content: dict[str, Any] = json.loads(_text("conditions.json"))
    return content


@cache
def reports_of(engine_name: str | None) -> tuple[Report, ...]:
    """The reports that may be of a server of this engine."""
    if engine_name is None:
        return ()
    own = (from_plain(Report, {"engines": [engine_name], **row}) for row in engine_data(FILE).get(engine_name, ()))
    libraries = (from_plain(Report, row) for row in json.loads(_text("library_reports.json")))
    return (*own, *(report for report in libraries if engine_name in report.engines))


def every_report() -> tuple[Report, ...]:
    """All reports, each once, by engine; of a library's one with all its engines."""
    names = sorted(engine_data(FILE))
    return tuple(dict.fromkeys(replace(report) for name in names for report in reports_of(name)))


def signs_in(log: str, engine_name: str | None) -> tuple[str, ...]:
    """The ids of the reports whose log line is in a log."""
    return tuple(one.id for one in reports_of(engine_name) if one.log is not None and re.search(one.log, log))


def _text(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
