"""The JSON document, `schema_version` 2: a Diagnosis as plain values. Its schema is `diagnosis.schema.json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvdiag.kv.calibration.running_server import Served, block_bytes, pool_bytes, served
from kvdiag.model import Device, Diagnosis, Facts, Finding, Gap, KvPool, LedgerLine, Quantity, Sample, StepResult

SCHEMA_VERSION = 2
"""Of the documents of diagnoses, audits and fleets; docs/json-schema-2.md lists what changed."""

Json = dict[str, Any]


def document(diagnosis: Diagnosis) -> Json:
    """The whole document. Units are in the names or beside the values; bytes are integers; unknown is null."""
    return {
        "schema_version": SCHEMA_VERSION,
        "worst": diagnosis.worst,
        "subject": subject(diagnosis.facts),
        "window": {
            "start": diagnosis.start_seconds,
            "end": diagnosis.end_seconds,
            "samples": diagnosis.samples,
        },
        "steps": [_step(step) for step in diagnosis.steps],
        "findings": [finding_values(finding) for finding in diagnosis.findings],
        "ledger": [ledger_line(line) for line in diagnosis.ledger],
        "gaps": [_gap(gap) for gap in diagnosis.gaps],
    }


def audit_document(facts: Facts, sample: Sample | None, lines: tuple[LedgerLine, ...], gaps: tuple[Gap, ...]) -> Json:
    """The memory audit alone: the devices' totals, and the lines that add up to what is used of them."""
    return {
        "schema_version": SCHEMA_VERSION,
        "subject": subject(facts),
        "devices": [_device(device) for device in (sample.devices if sample is not None else None) or ()],
        "ledger": [ledger_line(line) for line in lines],
        "gaps": [_gap(gap) for gap in (*facts.gaps, *gaps)],
    }


def subject(facts: Facts) -> Json:
    """The server that was diagnosed."""
    return {
        "url": facts.url,
        "engine": facts.engine_name,
        "engine_version": facts.engine_version,
        "model": facts.model,
        "max_model_len_tokens": facts.max_model_len_tokens,
        "weights_bytes": facts.weights_bytes,
        "server_pids": None if facts.server_pids is None else list(facts.server_pids),
        "forced": facts.forced,
        "pools": [_pool(pool, facts) for pool in facts.pools],
    }


def _pool(pool: KvPool, facts: Facts) -> Json:
    whole, block = pool_bytes(facts, pool), block_bytes(facts, pool)
    return {
        "engine": pool.engine,
        "block_tokens": pool.block_tokens,
        "total_blocks": pool.total_blocks,
        "usable_blocks": pool.usable_blocks,
        "capacity_tokens": pool.capacity_tokens,
        "max_concurrency": pool.max_concurrency,
        "pool_bytes": None if whole is None else whole[0],
        "block_bytes": None if block is None else block[0],
        "bytes_source": None if whole is None else whole[1],
        "cost_model": cost_model(served(facts, pool)),
    }


def cost_model(model: Served | str) -> Json:
    """What the model's config predicts for a pool and what the engine reports; `problem` says why there is none."""
    if isinstance(model, str):
        return {"architecture": None, "assumed": None, "figures": [], "problem": model}
    return {
        "architecture": model.architecture.model_type,
        "assumed": model.assumed,
        "figures": [
            {
                "figure": figure.figure.value,
                "predicted": figure.predicted.nominal,
                "reported": figure.reported.nominal,
                "drift_ratio": round(figure.drift_ratio, 6),
                "reasons": [reason.text for reason in figure.reasons],
            }
            for figure in model.figures
        ],
        "problem": None,
    }


def _device(device: Device) -> Json:
    memory = device.memory
    return {
        "gpu": device.index,
        "uuid": device.uuid,
        "name": device.name,
        "total_bytes": None if memory is None else memory.total_bytes,
        "used_bytes": None if memory is None else memory.used_bytes,
        "free_bytes": None if memory is None else memory.free_bytes,
    }


def _step(step: StepResult) -> Json:
    return {
        "id": step.id,
        "status": step.status,
        "expected": _quantities(step.expected),
        "measured": _quantities(step.measured),
        "summary": step.summary,
        "notes": list(step.notes),
    }


def _quantities(quantities: tuple[Quantity, ...]) -> Json:
    return {quantity.name: quantity.value for quantity in quantities}


def finding_values(finding: Finding) -> Json:
    """One finding, with its evidence."""
    return {
        "id": finding.id,
        "status": finding.status,
        "summary": finding.summary,
        "evidence": [
            {"name": one.name, "value": one.value, "unit": one.unit, "source": one.source} for one in finding.evidence
        ],
        "holder": finding.holder,
        "growth": None if finding.growth is None else asdict(finding.growth),
        "imbalance": None if finding.imbalance is None else asdict(finding.imbalance),
        "likely_cause": finding.likely_cause,
        "confirm": finding.confirm,
        "remedy": finding.remedy,
        "runbook": finding.runbook,
    }


def ledger_line(line: LedgerLine) -> Json:
    """One line of the ledger."""
    return {
        "gpu": line.gpu,
        "uuid": line.uuid,
        "component": line.component,
        "bytes": line.bytes,
        "source": line.provenance,
        "detail": line.detail,
    }


def _gap(gap: Gap) -> Json:
    return {"source": gap.source, "kind": gap.kind, "reason": gap.reason}
