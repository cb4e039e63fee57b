"""Incidents before any request: other processes, orphans, copies, ranks, sizes that do not fit."""

from collections.abc import Mapping
from dataclasses import replace

from kvdiag.model import Gap
from tests.quality.corpus.incident import CORE, WORKER, Record, Shape, host_of, kv_pool, server
from tests.quality.corpus.recording import NOT_UP, Gpu, Holder, Pages, Recording, serving
from tests.quality.corpus.tape import GIB, MIB, Tape

NOT_REPORTED = Gap(source="engine", kind="absent", reason="there is no server")


def _contexts(
    tape: Tape, *, ranks: int, main_bytes: float, context_bytes: float, total_bytes: int, shape: Shape
) -> Recording:
    """Every other rank has a context on GPU 0 too, from its first use on."""
    cards = []
    for index in range(ranks):
        holders = [Holder(pid=WORKER + index, name=f"VLLM::Worker_TP{index}", held=tape.flat(main_bytes))]
        if index == 0:
            held = tape.levels((0.1, context_bytes))
            holders += [
                Holder(pid=WORKER + other, name=f"VLLM::Worker_TP{other}", held=held) for other in range(1, ranks)
            ]
        cards.append(Gpu(total_bytes=total_bytes, holders=tuple(holders)))
    demand = tape.pauses(tape.traffic(), every=1.0, lasting=0.2)
    recording = server(tape, shape, demand=demand)
    return replace(recording, gpus=tuple(cards))


def _ipc(tape: Tape) -> Recording:
    shape = Shape(gpus=4, engine_name="sglang", asked=None, version="0.5.6", fraction=0.9)
    return _contexts(tape, ranks=4, main_bytes=70.0 * GIB, context_bytes=530.0 * MIB, total_bytes=80 * GIB, shape=shape)


def _device_zero(tape: Tape) -> Recording:
    shape = Shape(gpus=8, total_bytes=40 * GIB, weights_bytes=4 * GIB, pool=kv_pool(18.0))
    return _contexts(
        tape, ranks=8, main_bytes=26_167.0 * MIB, context_bytes=871.0 * MIB, total_bytes=40 * GIB, shape=shape
    )


def _two_engines(tape: Tape) -> Recording:
    """DP2 x TP8: the first engine's pool is 2.73 GB, the other's 6.77 GB; one rank holds the difference."""

    def sized(label: str, tokens: int) -> object:
        return replace(kv_pool(6.77), engine=label, capacity_tokens=tokens, usable_blocks=tokens // 128,
                       usage_blocks=tokens // 128, total_blocks=tokens // 128 + 1, block_tokens=128)  # fmt: skip

    pools = (sized("0", 38_144), sized("1", 95_232))
    shape = Shape(gpus=16, total_bytes=64 * GIB, weights_bytes=43 * GIB, version="0.11.0", max_model_len_tokens=16_384)
    recording = server(tape, shape, pools=pools, tensor_parallel=8)
    cards = []
    for index, card in enumerate(recording.gpus):
        held = 57.0 - 4.04 if index < 8 and index else 57.0
        cards.append(replace(card, holders=(replace(card.holders[0], held=tape.flat(held * GIB)),)))
    demand = tape.pauses(tape.traffic(), every=1.0, lasting=0.2)
    first = serving(tape, demand, pools[0], most_running=8)  # type: ignore[arg-type]
    second = serving(tape, demand, pools[1], most_running=8)  # type: ignore[arg-type]
    pages: Pages = [
        (*one, replace(other[0], engine="1"))
        for one, other in zip(first, second, strict=True)
        if isinstance(one, tuple) and isinstance(other, tuple)
    ]
    return replace(recording, gpus=tuple(cards), pages=pages)


def _copied(tape: Tape) -> Recording:
    """The second copy comes with the injection, after the weights; DeepSpeed has no pool and no page."""
    held = tape.levels((0.0, 0.5 * GIB), (0.05, 12.9 * GIB), (0.1, 25.6 * GIB))
    card = Gpu(total_bytes=32 * GIB, holders=(Holder(pid=CORE, name="python3", held=held),))
    return Recording(tape=tape, gpus=(card,), facts={"weights_bytes": round(12.4 * GIB), "host_limit_bytes": 256 * GIB})


def _orphans(tape: Tape) -> Recording:
    cards = tuple(
        Gpu(
            total_bytes=80 * GIB,
            holders=(
                Holder(pid=4_000 + rank, name=f"VLLM::Worker_TP{rank}", held=tape.flat(72.3 * GIB), own=False),
                Holder(pid=WORKER + rank, name=f"VLLM::Worker_TP{rank}", held=tape.levels((0.02, 1.4 * GIB))),
            ),
        )
        for rank in range(2)
    )
    shape = Shape(gpus=2, version="0.28.1")
    return Recording(
        tape=tape,
        pages=[NOT_UP for _ in tape.hours],
        gpus=cards,
        host=host_of(tape, grown={}, ranks=2),
        facts=shape.facts(pools=(), max_model_len_tokens=None),
    )


def _nobody(tape: Tape) -> Recording:
    card = Gpu(total_bytes=12_181 * MIB, unlisted=tape.flat(352.0 * MIB), driver_reserved_bytes=0)
    return Recording(tape=tape, pages=[NOT_REPORTED for _ in tape.hours], gpus=(card,), facts={"gaps": (NOT_REPORTED,)})


def _lets_go(tape: Tape) -> Recording:
    total = 94 * GIB
    own = tape.levels((0.0, 0.6 * GIB), (0.02, 3.3 * GIB))
    other = tape.levels((0.0, 10.0 * GIB), (0.06, 0.0))
    card = Gpu(
        total_bytes=total,
        holders=(
            Holder(pid=CORE, name="VLLM::EngineCore", held=own),
            Holder(pid=900, name="python3", held=other, own=False),
        ),
    )
    facts = Shape(version="0.29.0", total_bytes=total).facts(pools=(), max_model_len_tokens=None)
    return Recording(
        tape=tape, pages=[NOT_UP for _ in tape.hours], gpus=(card,), host=host_of(tape, grown={}), facts=facts
    )


def _beside(tape: Tape) -> Recording:
    """The first server has its 70 %; the second, judged here, was given 20 % and cannot start."""
    card = Gpu(
        total_bytes=80 * GIB,
        holders=(
            Holder(pid=900, name="VLLM::EngineCore", held=tape.flat(56.4 * GIB), own=False),
            Holder(pid=CORE, name="VLLM::EngineCore", held=tape.levels((0.01, 6.0 * GIB), (0.08, 0.0))),
        ),
    )
    facts = Shape(version="0.9.0", weights_bytes=4 * GIB).facts(pools=(), max_model_len_tokens=None)
    return Recording(
        tape=tape, pages=[NOT_UP for _ in tape.hours], gpus=(card,), host=host_of(tape, grown={}), facts=facts
    )


def _cold(tape: Tape) -> Recording:
    pool = replace(kv_pool(62.2, token_kib=144.0), capacity_tokens=452_800)
    shape = Shape(weights_bytes=round(7.6 * GIB), pool=pool, fraction=0.885, asked=0.9, version="0.28.0")
    return server(tape, shape)


def _autotuned(tape: Tape) -> Recording:
    pool = replace(kv_pool(1.76, token_kib=40.0), capacity_tokens=44_016)
    shape = Shape(total_bytes=32 * GIB, weights_bytes=round(20.5 * GIB), pool=pool, fraction=0.92, version="0.17.1",
                  max_model_len_tokens=32_768)  # fmt: skip
    return server(tape, shape)


def _too_long(tape: Tape) -> Recording:
    """It never serves: the pool would hold 63,040 tokens, one request may have 163,840."""
    shape = Shape(gpus=2, total_bytes=48 * GIB, weights_bytes=15 * GIB, version="0.5.1")
    held = tape.levels((0.0, 0.5 * GIB), (0.02, 15.3 * GIB), (0.06, 17.9 * GIB), (0.09, 0.0))
    cards = tuple(replace(card, holders=(replace(card.holders[0], held=held),)) for card in shape.cards(tape))
    facts = shape.facts(pools=(), max_model_len_tokens=163_840)
    host = host_of(tape, grown={}, ranks=2)
    return Recording(tape=tape, pages=[NOT_UP for _ in tape.hours], gpus=cards, host=host, facts=facts)


BASELINE_INCIDENTS: Mapping[str, Record] = {
    "dev-sglang-ctx": _ipc,
    "shard-dp0-3184": _two_engines,
    "dev-ctx-ranks": _device_zero,
    "base-ds-2578": _copied,
    "base-orphan-55510": _orphans,
    "base-nopid": _nobody,
    "base-assert-56830": _lets_go,
    "base-v1-profile": _beside,
    "base-coldcompile": _cold,
    "base-warmup-36973": _autotuned,
    "cap-6211": _too_long,
}
