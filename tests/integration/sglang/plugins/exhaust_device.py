"""Makes torch refuse an allocation in SGLang's forward pass of a long prompt, with the message of a full GPU."""

import os
from typing import Any

LEAST_TOKENS = "KVDIAG_TEST_REFUSED_TOKENS"
MESSAGE = (
    "CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is "
    "free. Process 4711 has 78.08 GiB memory in use. Of the allocated memory 75.90 GiB is allocated by PyTorch, and "
    "211.57 MiB is reserved by PyTorch but unallocated."
)


def register() -> None:
    """Patch the scheduler, before the server forks it."""
    import torch  # noqa: PLC0415 - the server's own Python
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415 - the server's own Python

    least, run_batch = int(os.environ[LEAST_TOKENS]), Scheduler.run_batch

    def refuse(scheduler: Any, batch: Any, *arguments: Any, **more: Any) -> Any:
        if (batch.extend_num_tokens or 0) >= least:
            raise torch.OutOfMemoryError(MESSAGE.format(asked=1.96))
        return run_batch(scheduler, batch, *arguments, **more)

    Scheduler.run_batch = refuse
