"""vLLM's processes by the titles that they give themselves. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

TITLE = re.compile(r"vllm|enginecore|worker", re.IGNORECASE)
"""vllm/utils/system_utils.py::set_process_title."""

_PARALLEL = re.compile(r" (--tensor-parallel|--pipeline-parallel|-tp|-pp|--config|--distributed-executor)\b")


def parallel_ranks(commands: Iterable[str]) -> tuple[int, int] | None:
    """Tensor-parallel and pipeline-parallel ranks of one engine; `None` where the processes do not show them.

    Workers are called VLLM::Worker_PP1_TP3, without the part that has one rank only
    (vllm/v1/executor/multiproc_executor.py::WorkerProc.setup_proc_title_and_log_prefix). An engine without workers is
    one rank (UniProcExecutor), unless its command asks for more (Ray's workers are no children of the server).
    Context parallelism is not modelled: `None`.
    """
    commands = list(commands)
    workers = [command.removeprefix("VLLM::Worker") for command in commands if command.startswith("VLLM::Worker")]
    if not workers:
        alone = any(command.startswith("VLLM::EngineCore") for command in commands)
        return (1, 1) if alone and not any(_PARALLEL.search(command) for command in commands) else None
    parts = [dict(re.findall(r"_([A-Z]{2,3})(\d{1,4})", worker)) for worker in workers]
    if any(name in part for part in parts for name in ("PCP", "DCP")):
        return None
    tensor, pipeline = (1 + max(int(part.get(name, 0)) for part in parts) for name in ("TP", "PP"))
    return tensor, pipeline
