"""A day of other engines' servers: what is odd but healthy there is no fault, and a leak in the same day is one."""

from dataclasses import replace
from typing import Any

from kvdiag.diagnosis import diagnose
from kvdiag.model import Capabilities, Diagnosis, Engine, Status
from tests.quality.corpus.engine_incidents import SGLANG
from tests.quality.corpus.incident import SERVER, Shape, kv_pool, server
from tests.quality.corpus.recording import Gpu, Holder, HostMemory, Pages, Recording, serving, standard_series
from tests.quality.corpus.tape import GIB, MIB, Tape, Track, capped, running_total, scaled, total

LLAMA = Capabilities(unit="cell", usage=False, blocks=False, returns=False, salt=False)
TOKENS = 262_144


def called(diagnosis: Diagnosis) -> dict[str, Status]:
    """Every fault and suspect."""
    return {one.id: one.status for one in diagnosis.findings if one.status in {"fault", "suspect"}}


def sglang(name: str, *, leaked_per_hour: float = 0.0) -> Recording:
    """Pauses each hour; every page is that of the sample before, half a minute late; a few retractions at the peak."""
    tape = Tape(name, hours=24.0, tick_seconds=30.0)
    pool = replace(kv_pool(1.0), block_tokens=1, total_blocks=TOKENS + 1, usable_blocks=TOKENS, usage_blocks=TOKENS,
                   capacity_tokens=TOKENS)  # fmt: skip
    shape = Shape(engine_name="sglang", asked=None, version="0.5.23", pool=pool)
    demand = tape.pauses(tape.traffic(), every=1.0, lasting=0.2)
    held = running_total([leaked_per_hour * tape.tick_seconds / 3600.0 * (value > 0.0) for value in demand])
    pages = serving(tape, demand, pool, request_tokens=3_000, held_blocks=held)
    late: Pages = [pages[max(place - 1, 0)] for place in range(len(pages))]
    shown: Pages = [
        (replace(one[0], preemptions_total=min(place // 2_000, 1), kv_usage_ratio=one[0].kv_usage_ratio),)
        for place, one in enumerate(page for page in late if isinstance(page, tuple))
    ]
    return server(tape, shape, demand=demand, pages=shown, capabilities=SGLANG)


def llama(name: str, *, host: Track | None = None, device_per_hour: float = 0.0) -> Recording:
    """Four slots that are full for hours, a prompt cache that grows to 8 GiB and is then flat, a GPU that is flat."""
    tape = Tape(name, hours=24.0, tick_seconds=60.0)
    demand = tape.pauses(tape.traffic(0.7), every=2.0, lasting=0.3)
    done = running_total(tape.events([300.0 * value for value in demand]))
    cache = capped(scaled(done, 3.0 * MIB), 8.0 * GIB)
    pages: Pages = [
        (
            Engine(
                engine="0",
                requests_running=4 if value else 0,
                requests_waiting=round(3 * value) if value > 0.8 else 0,
                prompt_tokens_total=round(1_000 * count),
                generation_tokens_total=round(200 * count),
            ),
        )
        for value, count in zip(demand, done, strict=True)
    ]
    anonymous = total(scaled(cache if host is None else host, 1.0, 2.0 * GIB), tape.noise(6.0 * MIB, 3.0))
    gpu = total(tape.flat(18.0 * GIB), tape.line(device_per_hour))
    facts: dict[str, Any] = {"engine_name": "llamacpp", "capabilities": LLAMA, "host_limit_bytes": 64 * GIB}
    return Recording(
        tape=tape,
        pages=pages,
        gpus=(Gpu(total_bytes=24 * GIB, holders=(Holder(pid=SERVER, name="llama-server", held=gpu),)),),
        host=(HostMemory(pid=SERVER, name="llama-server", anonymous=anonymous),),
        facts=facts,
    )


def both(recording: Recording) -> tuple[dict[str, Status], dict[str, Status]]:
    """What is called of a recording, and of the standard series that Prometheus has of it."""
    timeline, facts = recording.play()
    return called(diagnose(timeline, facts)), called(diagnose(*standard_series(timeline, facts)))


def test_day_of_sglang_with_late_gauges_and_retractions_is_no_fault() -> None:
    """Gauges are half a minute late at each pause, the radix cache is no use of the pool, one retraction is none."""
    assert [False, False] == ["fault" in one.values() for one in both(sglang("healthy sglang"))]


def test_tokens_that_sglang_loses_are_a_fault() -> None:
    """The same day, in which 400 tokens an hour are not released."""
    assert [{"leak.kv_blocks": "fault"}] * 2 == [
        {name: status for name, status in one.items() if name == "leak.kv_blocks"}
        for one in both(sglang("leaking sglang", leaked_per_hour=400.0))
    ]


def test_day_of_llama_with_a_growing_prompt_cache_and_full_slots_is_no_fault() -> None:
    """The host prompt cache takes hours to reach its default limit, and slots that are busy are no lack of room."""
    assert [False, False] == ["fault" in one.values() for one in both(llama("healthy llama"))]


def test_host_memory_of_llama_beyond_its_cache_is_a_fault() -> None:
    """The same day, in which host memory runs through the limit of the prompt cache."""
    tape = Tape("leaking llama", hours=24.0, tick_seconds=60.0)
    grown = tape.line(1.2 * GIB)
    assert ["fault"] * 2 == [one.get("leak.host") for one in both(llama("leaking llama", host=grown))]


def test_device_memory_that_llama_keeps_is_a_fault() -> None:
    """Buffers are allocated at start: 150 MiB an hour more is a leak outside torch."""
    assert ["fault"] * 2 == [
        one.get("leak.device_non_torch") for one in both(llama("growing llama", device_per_hour=150.0 * MIB))
    ]
