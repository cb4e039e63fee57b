"""Models and reports that are reckoned by hand: a layer of 4,096 bytes a token, 64 KiB a block.

Requests of 100 tokens take 7 blocks: of 70 blocks the engine says 10 requests and 1,000 tokens since it counts blocks
of requests, and 70 x 16 / 100 = 11.2 requests and 1,120 tokens before.
"""

from dataclasses import replace
from typing import Any

from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.kv.layout.deployment import Deployment
from kvdiag.kv.layout.layers import Architecture, AttentionLayer, LayerKind

PAGE = 65_536
LAYERS = tuple(
    AttentionLayer(index=index, kind=LayerKind.FULL, kv_heads=8, head_size=128, head_size_v=128) for index in range(3)
)
MODEL = Architecture(model_type="llama", depth=1, attention_heads=32, layers=LAYERS[:1], dtype="bfloat16")
HYBRID = replace(MODEL, depth=2, layers=(LAYERS[0], replace(LAYERS[1], kind=LayerKind.SLIDING, window_tokens=1024)))
"""A request of 100 tokens takes 7 blocks of the one and, windows having a block more, 8 of the other."""
STAGED = replace(MODEL, depth=3, layers=LAYERS)
"""Over two stages: two layers and one."""
STAGES = Deployment(pipeline_parallel=2)


def rank(
    name: str = "rank", *, stage: int | None = None, pool: int | None = None, weights: int | None = None
) -> RankReport:
    """A rank that reports these bytes exactly."""
    sizes = [None if size is None else PrintedSize(nominal_bytes=size) for size in (pool, weights)]
    return RankReport(name=name, stage=stage, pool=sizes[0], weights=sizes[1])


def report(*ranks: RankReport, version: str | None = None, **figures: Any) -> EngineReport:
    """A report for requests of 100 tokens."""
    known = EngineReport(settings=EngineSettings(version=version), ranks=ranks, concurrency_context_tokens=100)
    return replace(known, **figures)
