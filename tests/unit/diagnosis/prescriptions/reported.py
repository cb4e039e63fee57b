"""The servers that public reports describe, each with the finding that it had: tests/…/reported_servers.json.

A report that no entry of kvdiag's data belongs to says why.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvdiag.diagnosis.prescriptions import with_known_reports
from kvdiag.diagnosis.prescriptions.known_reports import Report, reports_of
from kvdiag.model import Facts, Finding, KnownReport, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedServer:
    """A server of an incident, and its finding."""

    incident: str
    sources: tuple[str, ...]
    verdict: str
    facts: Facts
    holder: str | None

    def finding(self, status: Status = "fault") -> Finding:
        """The finding that it had."""
        return Finding(self.verdict, status, "as reported", holder=self.holder)

    def matched(self) -> tuple[KnownReport, ...]:
        """What its finding matches."""
        prescription = with_known_reports(self.finding(), self.facts).prescription
        return () if prescription is None else prescription.known_reports

    @property
    def own(self) -> list[Report]:
        """The entries that have one of its sources as their link."""
        mine = set(map(thread, self.sources))
        return [one for one in reports_of(self.facts.engine_name) if mine & set(map(thread, one.links))]


def thread(link: str) -> str:
    """The repository and number of a link, whether it calls it an issue or a pull request."""
    return re.sub(r"/(?:pull|issues)/", "#", link)


@cache
def rows() -> tuple[Mapping[str, Any], ...]:
    """Each incident as the file has it."""
    return tuple(json.loads(Path(__file__).with_name("reported_servers.json").read_bytes()))


def servers() -> list[ReportedServer]:
    """Each incident that has an entry, as its server."""
    fields = ("kv_connector", "tensor_parallel", "pipeline_parallel", "model_config")
    return [
        ReportedServer(
            incident=row["incident"],
            sources=tuple(row["sources"]),
            verdict=row["verdict"],
            holder=row.get("holder"),
            facts=Facts(
                engine_name=row["engine"],
                engine_version=row["version"],
                features=tuple(row["features"]) if "features" in row else None,
                **{name: row[name] for name in fields if name in row},
            ),
        )
        for row in rows()
        if "left_out" not in row
    ]
