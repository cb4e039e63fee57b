"""The JSON document of many replicas, `schema_version` 2. Its schema is `fleet.schema.json`."""

from __future__ import annotations

from typing import Any

from kvdiag.outputs.documents.diagnosis_document import SCHEMA_VERSION
from kvdiag.outputs.documents.diagnosis_document import document as whole
from kvdiag.outputs.documents.versions_document import values
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged, Source

Json = dict[str, Any]


def document(result: FleetDiagnosis) -> Json:
    """The whole document: the replicas with the worst first, each in the form of a document of its own."""
    source = result.source
    return {
        "schema_version": SCHEMA_VERSION,
        "worst": result.worst,
        "source": None if source is None else _source(source),
        "replicas": [_replica(one) for one in result.judged],
        "fleet": {"replicas": len(result.judged), "by_worst": dict(result.by_worst), **values(result.fleet)},
        "gaps": [{"source": gap.source, "kind": gap.kind, "reason": gap.reason} for gap in result.gaps],
    }


def _source(source: Source) -> Json:
    return {
        "url": source.url,
        "match": source.match,
        "start": source.start_seconds,
        "end": source.end_seconds,
        "join_tolerance_seconds": source.join_seconds,
    }


def _replica(one: Judged) -> Json:
    told = whole(one.diagnosis)
    return {
        "subject": dict(one.subject),
        "worst": told["worst"],
        "server": told["subject"],
        "window": told["window"],
        "findings": told["findings"],
        "ledger": told["ledger"],
        "gaps": told["gaps"],
    }
