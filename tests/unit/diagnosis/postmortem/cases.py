"""Cases made from texts and figures, without files."""

import re
from dataclasses import replace
from typing import Any

from kvdiag.diagnosis.postmortem import Case, postmortem
from kvdiag.engines import vllm
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.model import Finding, ReservedSplit
from kvdiag.oom.account import Account
from kvdiag.oom.log import read_failures
from kvdiag.oom.message import Shortage

MIB, GIB = 2**20, 2**30

FLAGS = vllm.ENGINE.flags

FRACTION, MODEL_LEN = "--gpu-memory-utilization", "--max-model-len"
BATCHED, SEQUENCES = "--max-num-batched-tokens", "--max-num-seqs"


def case_of(text: str) -> Case:
    """A case of one text, as a log would be one without its start."""
    found = read_failures(text)
    if found is None:
        return Case(has_log=True, flags=FLAGS)
    names = ("shortage", "process", "rank", "phase", "phase_source", "work", "running", "waiting", "max_num_seqs")
    of_log = Account(origin="a log", **{name: getattr(found, name) for name in names})
    return Case(accounts=(of_log,), has_log=True, flags=FLAGS)


def account(kind: str = "torch", **changes: Any) -> Account:
    """1 GiB asked for on 80 GiB that are full of this process; `changes` are of the account or its figures."""
    usual = Shortage(
        kind=kind,  # type: ignore[arg-type]
        message="",
        device=0,
        asked_bytes=GIB,
        free_bytes=256 * MIB,
        total_bytes=80 * GIB,
        allocated_bytes=77 * GIB,
        unallocated_bytes=128 * MIB,
        process_bytes=79 * GIB + 700 * MIB,
    )
    figures = {name: value for name, value in changes.items() if name in Shortage.__slots__}
    others = {name: value for name, value in changes.items() if name not in figures}
    return Account(**{"origin": "a log", "shortage": replace(usual, **figures), **others})


def split(
    *,
    pending_bytes: int = 0,
    private_bytes: int = 0,
    stranded_bytes: int = 0,
    releasable_bytes: int = 0,
    largest_free_block_bytes: int = 0,
) -> ReservedSplit:
    """77 GiB live, and what is named."""
    return ReservedSplit(
        age_seconds=0.0,
        reserved_bytes=77 * GIB + pending_bytes + private_bytes + stranded_bytes + releasable_bytes,
        live_bytes=77 * GIB,
        pending_bytes=pending_bytes,
        private_bytes=private_bytes,
        releasable_bytes=releasable_bytes,
        stranded_bytes=stranded_bytes,
        largest_free_block_bytes=largest_free_block_bytes,
        pinned_segments=0,
        pinned_free_bytes=0,
        request_bytes=GIB,
    )


def finding(verdict: str, *accounts: Account, **parts: Any) -> Finding:
    """What a post-mortem says of one verdict."""
    diagnosis = postmortem(Case(accounts=accounts, **{"flags": FLAGS, **parts}))
    return next(one for one in diagnosis.findings if one.id == verdict)


def report_of(fraction: float | None = 0.95, **sizes_gib: int | None) -> EngineReport:
    """A log of the start in which one rank prints its sizes."""
    sizes = {name: None if size is None else PrintedSize(nominal_bytes=size * GIB) for name, size in sizes_gib.items()}
    rank = RankReport(name="Worker_TP0", **sizes)  # type: ignore[arg-type]
    return EngineReport(
        settings=EngineSettings(memory_fraction_ratio=fraction, max_num_batched_tokens=8192), ranks=(rank,)
    )


def status_of_text(text: str, verdict: str) -> tuple[str, Finding]:
    """Worst status of a text's diagnosis, and its finding of one verdict."""
    diagnosis = postmortem(case_of(text))
    return diagnosis.worst, next(one for one in diagnosis.findings if one.id == verdict)


def changes(one: Finding) -> dict[str, float]:
    """The new value of every setting that a remedy changes from one value to another."""
    found = re.findall(r"(--[a-z-]+)[^;>]*?: (?:[\d.]+|now) -> ([\d.]*\d)", one.remedy or "")
    return {flag: float(value) for flag, value in found}
