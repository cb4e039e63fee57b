"""The JSON document, `schema_version` 2: a Diagnosis as plain values. Its schema is `diagnosis.schema.json`."""

from typing import TYPE_CHECKING

from kvdiag.engine_memory import modelled_engines
from kvdiag.kv.calibration.running_server import block_bytes, pool_bytes, served
from kvdiag.model import BlockOwners, Device, Diagnosis, Facts, Gap, KvPool, LedgerLine, Sample
from kvdiag.outputs.documents import Json, fields_of, plain
from kvdiag.outputs.documents.profile_document import profile_entry

if TYPE_CHECKING:
    from kvdiag.kv.calibration.served_layout import Served

SCHEMA_VERSION = 2
"""Of the documents of diagnoses, audits and fleets; docs/json-schema-2.md lists what changed."""


def document(diagnosis: Diagnosis) -> Json:
    """The whole document. Units are in the names or next to the values; bytes are integers; unknown is null."""
    return {
        "schema_version": SCHEMA_VERSION,
        **fields_of(diagnosis, "worst", "down_since_seconds"),
        "subject": subject(diagnosis.facts),
        "window": fields_of(diagnosis, start="start_seconds", end="end_seconds", samples="samples"),
        "lives": plain(diagnosis.lives),
        "steps": plain(diagnosis.steps),
        "findings": plain(diagnosis.findings),
        "ledger": [ledger_line(line) for line in diagnosis.ledger],
        "block_owners": [owners_entry(one) for one in diagnosis.block_owners],
        "profiles": [profile_entry(one) for one in diagnosis.profiles],
        "gaps": plain(diagnosis.gaps),
    }


def audit_document(facts: Facts, sample: Sample | None, lines: tuple[LedgerLine, ...], gaps: tuple[Gap, ...]) -> Json:
    """The memory audit alone: the devices' totals, and the lines that add up to what is used of them."""
    return {
        "schema_version": SCHEMA_VERSION,
        "subject": subject(facts),
        "devices": [_device(device) for device in (sample.devices if sample is not None else None) or ()],
        "ledger": [ledger_line(line) for line in lines],
        "block_owners": [owners_entry(one) for one in (sample.block_owners if sample is not None else None) or ()],
        "gaps": plain((*facts.gaps, *gaps)),
    }


def subject(facts: Facts) -> Json:
    """The server that was diagnosed."""
    names = ("url", "engine_version", "model", "max_model_len_tokens", "weights_bytes", "server_pids", "forced")
    return fields_of(facts, *names, engine="engine_name") | {"pools": [_pool(pool, facts) for pool in facts.pools]}


def _pool(pool: KvPool, facts: Facts) -> Json:
    whole, block = pool_bytes(facts, pool), block_bytes(facts, pool)
    names = ("engine", "block_tokens", "total_blocks", "usable_blocks", "capacity_tokens", "max_concurrency")
    return fields_of(pool, *names) | {
        "pool_bytes": None if whole is None else whole[0],
        "block_bytes": None if block is None else block[0],
        "bytes_source": None if whole is None else whole[1],
        "cost_model": cost_model(served(facts, pool), facts),
    }


def cost_model(model: "Served | str", facts: Facts) -> Json:
    """What the model's config predicts for a pool and what the engine reports; `problem` says why there is none.

    The settings assumed are vLLM's, which change nothing of another engine's pool.
    """
    if isinstance(model, str):
        return {"architecture": None, "assumed": None, "figures": [], "problem": model}
    return {
        "architecture": model.architecture.model_type,
        "assumed": model.assumed if facts.engine_name in modelled_engines() else None,
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


def owners_entry(owners: BlockOwners) -> Json:
    """Who has the blocks of one engine's pool."""
    names = ("engine", "age_seconds", "usable_blocks", "counts", "connector")
    return fields_of(owners, *names, blocks="by_owner", requests="held")


def _device(device: Device) -> Json:
    memory = fields_of(device.memory, "total_bytes", "used_bytes", "free_bytes")
    return fields_of(device, "uuid", "name", gpu="index") | memory


def ledger_line(line: LedgerLine) -> Json:
    """One line of the ledger."""
    return fields_of(line, "gpu", "uuid", "component", "bytes", "detail", source="provenance")
