"""What TensorRT-LLM prints of its memory while it starts: the PyTorch backend, and the C++ runtime. Pure.

The PyTorch backend allocates a small pool for a trial run first, and prints the same line for both: the last counts
(tensorrt_llm/_torch/pyexecutor/_util.py).
"""

import re
from collections.abc import Iterable

from kvdiag.engines.printed_figures import Wordings

WORDINGS = Wordings("trtllm")

_PARALLEL = re.compile(r"--(tp|pp)(?:_size)?[ =](\d{1,4})\b")


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
