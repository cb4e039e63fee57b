"""What TensorRT-LLM prints of its memory while it starts: the PyTorch backend, and the C++ runtime. Pure.

The PyTorch backend allocates a small pool for a trial run first, and prints the same line for both: the last counts
(tensorrt_llm/_torch/pyexecutor/_util.py).
"""

import json
import pkgutil
import re
from collections.abc import Iterable

from kvdiag.engines.printed_figures import Wordings
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings

_WORDINGS = Wordings(json.loads(pkgutil.get_data(__package__, "wordings.json") or b""))

_PARALLEL = re.compile(r"--(tp|pp)(?:_size)?[ =](\d{1,4})\b")


def parse_log(text: str) -> EngineReport:
    """What the last start in `text` says of its memory; KvdiagError if it has none of its lines."""
    return _WORDINGS.report(text, title="TensorRT-LLM")


def parse_settings(lines: Iterable[str]) -> EngineSettings:
    """The settings that a log's lines show."""
    return _WORDINGS.settings(lines)


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
