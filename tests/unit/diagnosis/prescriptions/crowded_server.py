"""A server whose pool holds six of ten requests, of a model whose blocks are 2 MiB, on a GPU of 24 GiB."""

import json

from kvdiag.model import Facts, KvPool
from tests.builders.values import GIB, MIB, SERVER_PID, device, holding, pool, process, seen

LLAMA = json.dumps(
    {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
)
"""128 KiB of KV cache a token, 2 MiB a block of 16."""

EACH = 144
"""Blocks of one request."""

SIX = pool(usable_blocks=6 * EACH + 30, pool_bytes=None, capacity_tokens=None, max_concurrency=None)

FREE_BYTES = round(0.6 * GIB)

GPU = device(used_bytes=24 * GIB - FREE_BYTES, processes=(process(SERVER_PID, 20 * GIB),))

FULL = seen(*[holding(6 * EACH, of=SIX, running=6, waiting=4)] * 5, devices=(GPU,))
"""Six requests run in a pool that has no room for a seventh, four wait, and 0.6 GiB of the device are free."""


def known(of: KvPool, *, weights_bytes: int | None = 6 * GIB) -> Facts:
    """What is known of the server that has this pool."""
    return Facts(
        engine_name="vllm",
        engine_version="0.32.0",
        max_model_len_tokens=32_768,
        pools=(of,),
        server_pids=(SERVER_PID,),
        weights_bytes=weights_bytes,
        model_config=LLAMA,
        tensor_parallel=1,
        pipeline_parallel=1,
    )


assert EACH * 2 * MIB < FREE_BYTES
