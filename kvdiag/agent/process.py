"""This process's identity, host memory and rank, from /proc and from the modules that it has imported."""

from __future__ import annotations

import os
import sys
from typing import Any

MAX_TITLE_CHARACTERS = 64
MAX_STATUS_BYTES = 8192

TITLES = (b"VLLM::", b"sglang::", b"ray::")
"""How titles begin that vLLM, SGLang and Ray set."""

PROGRAMS = frozenset(
    (
        *(b"trtllm-serve", b"tensorrt_llm.commands.serve", b"mpi4py.futures.server"),
        *(b"tensorrt_llm.llmapi.mgmn_leader_node", b"tensorrt_llm.llmapi.mgmn_worker_node"),
        *(b"sglang.launch_server", b"lmdeploy", b"text-generation-server"),
    )
)
"""Scripts and modules of engines whose processes are all called python. TensorRT-LLM's ranks are spawned by MPI, as
`python -m mpi4py.futures.server` (mpi4py/futures/_lib.py) or by trtllm-llmapi-launch; TGI's launcher starts
`python …/text-generation-server serve` for each shard.
"""

RANK_VARIABLES = {
    "global": ("OMPI_COMM_WORLD_RANK",),
    "world": ("OMPI_COMM_WORLD_SIZE",),
    "local": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
"""Environment of torchrun and Open MPI: TensorRT-LLM's ranks under MPI do not initialize torch.distributed."""

MAX_PROGRAM_WORDS = 8
"""Of a command line, in front of which Python's own options may stand."""


def identity() -> dict[str, Any]:
    """The constant part: process ids in its own namespace, start in clock ticks since boot, user."""
    # proc_pid_stat(5): the name in parentheses may hold anything; the 22nd field is the 20th after it.
    after_name = _read("/proc/self/stat").rpartition(b")")[2].split()
    status = _read("/proc/self/status").splitlines()
    nested = next((line.split()[1:] for line in status if line.startswith(b"NSpid:")), [])
    return {
        "pid": os.getpid(),
        "namespace_pids": [int(pid) for pid in nested],
        # A reader with the same one can use these ids.
        "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,  # noqa: PTH116 - pathlib costs its import
        "start_ticks": int(after_name[19]),
        "user_id": os.getuid(),
    }


def title() -> str:
    """The title that the server gives this process, else the engine's program that it runs, else its program's name."""
    # Nothing else of a command line or title may be shown: either may contain keys.
    words = _read("/proc/self/cmdline").split(b"\0")
    programs = (word.rpartition(b"/")[2] for word in words[1:MAX_PROGRAM_WORDS])
    name = words[0] if words[0].startswith(TITLES) else next(filter(PROGRAMS.__contains__, programs), b"")
    word = next(iter((name or _read("/proc/self/comm")).decode("utf-8", "replace").split()), "")
    return word.partition("=")[0][:MAX_TITLE_CHARACTERS]


def host_bytes() -> dict[str, int]:
    """Resident bytes, and the anonymous ones, in memory or moved to swap, as far as the kernel reports them."""
    return parse_sizes(_read("/proc/self/status"))


def parse_sizes(status: bytes) -> dict[str, int]:
    """The sizes of a text as of proc_pid_status(5): a process without memory of its own has none of these lines."""
    sizes = {}
    for line in status.splitlines():
        name, _, size = line.partition(b":")
        if size.endswith(b" kB"):
            sizes[name] = int(size.split()[0]) * 1024
    found = {} if b"VmRSS" not in sizes else {"resident_bytes": sizes[b"VmRSS"]}
    if b"RssAnon" in sizes:
        found["anonymous_bytes"] = sizes[b"RssAnon"] + sizes.get(b"VmSwap", 0)
    return found


def ranks() -> dict[str, int]:
    """This process's ranks so far: torch's own, those in vLLM's or SGLang's groups, and those that MPI gives."""
    found: dict[str, int] = {}
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        found.update({"global": int(distributed.get_rank()), "world": int(distributed.get_world_size())})
    for module in ("vllm.distributed.parallel_state", "sglang.srt.distributed.parallel_state"):
        state = sys.modules.get(module)
        for name, group in (("tensor", "_TP"), ("pipeline", "_PP"), ("data", "_DP"), ("expert", "_EP")):
            rank = getattr(getattr(state, group, None), "rank_in_group", None)
            if isinstance(rank, int):
                found[name] = rank
    for name, variables in RANK_VARIABLES.items():
        value = next(filter(None, map(os.environ.get, variables)), "")
        if value.isascii() and value.isdigit():
            found.setdefault(name, int(value))
    return found


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, MAX_STATUS_BYTES)
    finally:
        os.close(file)
