"""What one incident of the corpus is, and the servers that most of them share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvdiag.model import KvPool
from tests.quality.corpus.recording import Gpu, Holder, HostMemory, Pages, Recording, Torch, serving
from tests.quality.corpus.tape import GIB, MIB, Tape, Track

SERVER, CORE, WORKER = 100, 101, 110
"""Process ids: the API server, the engine core, the first worker."""


Record = Callable[[Tape], Recording]
"""Makes an incident's recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A reported incident: what its trace is made of.

    `sources` are the public reports, `reported` what they say in figures, `assumed` what had to be chosen for the rest;
    all three go into the trace's header. `onset_hours` is when the fault begins in the trace. `text` is a failure's
    message where the report has one, by its id in tests/fixtures/failures/incidents.json.
    """

    id: str
    reported: str
    assumed: str
    record: Record
    hours: float
    tick_seconds: float = 60.0
    onset_hours: float = 0.0
    text: str | None = None
    sources: Sequence[str] = ()

    def recording(self, draw: int = 0) -> Recording:
        """The recording, always the same; another `draw` has new noise and traffic."""
        name = f"{self.id} {draw}" if draw else self.id
        return self.record(Tape(name, hours=self.hours, tick_seconds=self.tick_seconds))


def kv_pool(gib: float, *, token_kib: float = 128.0, block_tokens: int = 16, **changes: Any) -> KvPool:
    """A pool of so many bytes as vLLM reports it on a GPU: in blocks, without its bytes."""
    usable = round(gib * GIB / (token_kib * 1024.0 * block_tokens))
    usual: dict[str, Any] = {
        "engine": "0",
        "block_tokens": block_tokens,
        "total_blocks": usable + 1,
        "usable_blocks": usable,
        "usage_blocks": usable,
        "capacity_tokens": usable * block_tokens,
        "cache_dtype": "auto",
        "memory_fraction_ratio": 0.9,
        "prefix_caching": True,
    }
    return KvPool(**{**usual, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A server that allocates its pool at start: its GPUs, weights and pool on each, and the usual overhead."""

    gpus: int = 1
    total_bytes: int = 80 * GIB
    weights_bytes: int = 15 * GIB
    """On each GPU."""

    overhead_bytes: int = 3 * GIB
    pool: KvPool | None = field(default_factory=lambda: kv_pool(54.0))
    max_model_len_tokens: int | None = 32_768
    version: str | None = "0.10.2"
    engine_name: str | None = "vllm"
    host_limit_bytes: int | None = 256 * GIB
    fraction: float = 0.9
    """Share of each GPU that it holds."""

    asked: float | None = 0.0
    """gpu_memory_utilization as its metrics report it: `fraction` where 0, `None` where there is no such setting."""

    @property
    def held_bytes(self) -> int:
        """What each rank holds of its GPU."""
        return round(self.fraction * self.total_bytes)

    def facts(self, **changes: Any) -> dict[str, Any]:
        """What is known of it."""
        usual: dict[str, Any] = {
            "engine_name": self.engine_name,
            "engine_version": self.version,
            "pools": () if self.pool is None else (self.told(self.pool),),
            "max_model_len_tokens": self.max_model_len_tokens,
            "weights_bytes": self.weights_bytes * self.gpus,
            "host_limit_bytes": self.host_limit_bytes,
            "tensor_parallel": self.gpus,
        }
        return {**usual, **changes}

    def told(self, pool: KvPool) -> KvPool:
        """A pool with the configured memory fraction."""
        return replace(pool, memory_fraction_ratio=round(self.fraction, 2) if self.asked == 0.0 else self.asked)

    def cards(self, tape: Tape, grown: Sequence[Track | None] = ()) -> tuple[Gpu, ...]:
        """Its GPUs, flat but for what has `grown` on each; a few pages come with the first requests."""
        first = tape.of(lambda hour: self.held_bytes - (40.0 * MIB if hour < 0.1 else 0.0))
        cards = []
        for index in range(self.gpus):
            extra = grown[index] if index < len(grown) else None
            held = first if extra is None else [base + more for base, more in zip(first, extra, strict=True)]
            name = "VLLM::EngineCore" if self.gpus == 1 else f"VLLM::Worker_TP{index}"
            pid = CORE if self.gpus == 1 else WORKER + index
            cards.append(Gpu(total_bytes=self.total_bytes, holders=(Holder(pid=pid, name=name, held=held),)))
        return tuple(cards)


def host_of(tape: Tape, *, grown: dict[int, Track], core_gib: float = 5.0, ranks: int = 1) -> tuple[HostMemory, ...]:
    """The processes of a vLLM server on the host; `grown` by pid comes on top of what is usual."""
    usual = [(SERVER, "vllm", 2.2), (CORE, "VLLM::EngineCore", core_gib)]
    usual += [(WORKER + rank, f"VLLM::Worker_TP{rank}", 6.0) for rank in range(ranks if ranks > 1 else 0)]
    return tuple(
        HostMemory(
            pid=pid,
            name=name,
            anonymous=[
                gib * GIB + wobble + more
                for wobble, more in zip(tape.noise(8.0 * MIB, 4.0), grown.get(pid) or tape.flat(), strict=True)
            ],
        )
        for pid, name, gib in usual
    )


def server(
    tape: Tape,
    shape: Shape | None = None,
    *,
    demand: Track | None = None,
    pages: Pages | None = None,
    grown: Sequence[Track | None] = (),
    host_grown: dict[int, Track] | None = None,
    torch: tuple[Torch, ...] = (),
    **facts: Any,
) -> Recording:
    """A vLLM server under traffic, with what has grown on its GPUs and on its host."""
    shape = shape or Shape()
    demand = tape.traffic() if demand is None else demand
    return Recording(
        tape=tape,
        pages=serving(tape, demand, shape.pool) if pages is None else pages,
        gpus=shape.cards(tape, grown),
        torch=torch,
        host=host_of(tape, grown=host_grown or {}, ranks=shape.gpus),
        facts=shape.facts(**facts),
    )


def lone(
    tape: Tape, *, name: str, host: Track, gpu: Track, total_gib: float, host_limit_gib: float | None = 128.0
) -> Recording:
    """A server without vLLM's metrics: one process on one GPU and on the host."""
    return Recording(
        tape=tape,
        gpus=(Gpu(total_bytes=round(total_gib * GIB), holders=(Holder(pid=SERVER, name=name, held=gpu),)),),
        host=(HostMemory(pid=SERVER, name=name, anonymous=host),),
        facts={"host_limit_bytes": None if host_limit_gib is None else round(host_limit_gib * GIB)},
    )
