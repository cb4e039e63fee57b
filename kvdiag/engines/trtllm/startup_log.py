"""What TensorRT-LLM prints of its memory while it starts, or fails to: the PyTorch backend, and the C++ runtime. Pure.

The PyTorch backend allocates a small pool for a trial run first, and prints the same line for both: the last counts
(tensorrt_llm/_torch/pyexecutor/_util.py). If a component cannot be created, it prints what was free before and after
each of those that were (py_executor_creator.py): `created_components` reads that ledger.
"""

import json
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvdiag.engines.printed_figures import Wordings
from kvdiag.kv.calibration.engine_report import GIB, EngineReport, EngineSettings

_WORDINGS = Wordings(json.loads(pkgutil.get_data(__package__, "wordings.json") or b""))

_FAILED = "Executor creation failed due to insufficient GPU memory"
_COULD_NOT = re.compile(r"The following component could not be created: (\w[\w ()/-]{0,100})")
_TOTAL = re.compile(r"Total GPU memory \(GiB\): (\d{1,6}(?:\.\d{1,6})?)")
_BEFORE = re.compile(r"Free GPU memory before component creation attempt \(GiB\): (\d{1,6}(?:\.\d{1,6})?)")
_LEDGER = "Previously created components and free GPU memory before/after creation (GiB):"
_COMPONENT = re.compile(
    r"^[^\w(]{0,40}([A-Z][\w ()/-]{0,100}?): (\d{1,6}(?:\.\d{1,6})?) ?/ ?(\d{1,6}(?:\.\d{1,6})?)\s*$", re.MULTILINE
)
MAX_COMPONENTS = 64
MAX_LEDGER_CHARACTERS = 16 * 2**10

_PARALLEL = re.compile(r"--(tp|pp)(?:_size)?[ =](\d{1,4})\b")


@dataclass(frozen=True, slots=True)
class Component:
    """A part of the executor, and the device memory that was free before and after it was created."""

    name: str
    free_before_bytes: int
    free_after_bytes: int

    @property
    def taken_bytes(self) -> int:
        """What it took; negative where its creation released memory, as the end of the trial run does."""
        return self.free_before_bytes - self.free_after_bytes


@dataclass(frozen=True, slots=True)
class FailedCreation:
    """The component that found too little memory, and those that were created before it, in order."""

    component: str | None
    total_bytes: int | None
    free_bytes: int | None
    created: tuple[Component, ...]


def parse_log(text: str) -> EngineReport:
    """What the last start in `text` says of its memory; KvdiagError if it has none of its lines."""
    return _WORDINGS.report(text, title="TensorRT-LLM")


def parse_settings(lines: Iterable[str]) -> EngineSettings:
    """The settings that a log's lines show."""
    return _WORDINGS.settings(lines)


def failed_creation(text: str) -> FailedCreation | None:
    """The ledger of the last start that failed for lack of memory; `None` if the log has none."""
    at = text.rfind(_FAILED)
    if at < 0:
        return None
    part = text[at : at + MAX_LEDGER_CHARACTERS]
    name, total, free = _COULD_NOT.search(part), _TOTAL.search(part), _BEFORE.search(part)
    ledger = part.partition(_LEDGER)[2]
    return FailedCreation(
        component=name[1].strip() if name else None,
        total_bytes=_bytes(total[1]) if total else None,
        free_bytes=_bytes(free[1]) if free else None,
        created=tuple(
            Component(found[1], _bytes(found[2]), _bytes(found[3]))
            for found, _ in zip(_COMPONENT.finditer(ledger), range(MAX_COMPONENTS), strict=False)
        ),
    )


def _bytes(gib: str) -> int:
    return round(float(gib) * GIB)


def failed_pool_bytes(text: str) -> int | None:  # noqa: ARG001 - the log has what was free, not what was short
    """`None`: a failed start prints what was free, not how much was short."""
    return None


def parallel_ranks(commands: Iterable[str]) -> tuple[int, int] | None:
    """Tensor-parallel and pipeline-parallel ranks by the command lines; `None` where none is the server's.

    A file of --extra_llm_api_options may set others: with one, only what the command line sets is known.
    """
    serving = next((command for command in commands if "trtllm-serve" in command), None)
    if serving is None:
        return None
    found = {name: int(value) for name, value in _PARALLEL.findall(serving)}
    if not found and ("--extra_llm_api_options" in serving or "--config" in serving):
        return None
    return found.get("tp", 1), found.get("pp", 1)
