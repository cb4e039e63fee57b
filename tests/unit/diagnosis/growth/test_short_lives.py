"""Lives that are too short for a window each, taken together."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvdiag.model import Diagnosis, Facts, HostProcess, Sample
from tests.builders.answers import finding
from tests.builders.lives import judged
from tests.builders.values import GIB, MIB, device, engine

FACTS = Facts(engine_name="vllm", device_uuids=("GPU-0",), host_caches=())
LIFE_MINUTES = 40

Bytes = Callable[[float], float]


def short_life(number: int, host: Bytes, gpu: Bytes) -> Sequence[Sample]:
    """A life of forty minutes; bytes above a base are by the share of it that is over."""
    made = []
    for minute in range(LIFE_MINUTES):
        share = minute / LIFE_MINUTES
        size = round(8 * GIB + host(share))
        core = HostProcess(pid=500 + number, name="VLLM::EngineCore", resident_bytes=size, anonymous_bytes=size)
        page = replace(engine(usage=0.0), prompt_tokens_total=10 * minute)
        made.append(
            Sample(
                at_seconds=3600.0 * number + 60.0 * minute,
                engines=(page,),
                host=(core,),
                devices=(device(used_bytes=round(40 * GIB + gpu(share)), total_bytes=80 * GIB),),
            )
        )
    return made


def loop(*lives: Bytes, on_device: bool = False) -> Diagnosis:
    """A server restarted after each of these lives."""

    def flat(share: float) -> float:
        return 0.0

    return judged(
        *(short_life(number, *((flat, life) if on_device else (life, flat))) for number, life in enumerate(lives)),
        known=FACTS,
    )


def climbing(share: float) -> float:
    """Six GiB in each life."""
    return 6.0 * GIB * share


def warming(share: float) -> float:
    """Six GiB, nearly all of it in the first half."""
    return 6.0 * GIB * (1.0 - (1.0 - share) ** 4)


def still(share: float) -> float:
    """Nothing to speak of."""
    return 10.0 * MIB * share


@pytest.mark.parametrize(
    ("lives", "called"),
    [
        pytest.param((climbing,) * 4, True, id="each climbs to its end"),
        pytest.param((climbing, still, climbing, climbing), True, id="three of four"),
        pytest.param((climbing, still, climbing, still, climbing), False, id="three of five"),
        pytest.param((climbing,) * 2, False, id="two lives"),
        pytest.param((warming,) * 4, False, id="warm-up"),
        pytest.param((still,) * 4, False, id="still"),
    ],
)
@pytest.mark.parametrize("on_device", [False, True])
def test_lives_that_climb_to_their_end_are_suspect(lives: tuple[Bytes, ...], called: bool, on_device: bool) -> None:
    """Three or more, three quarters of all, and not ever more slowly."""
    found = loop(*lives, on_device=on_device)
    leak = finding(found, "leak.device_torch" if on_device else "leak.host")
    assert called is (leak.status == "suspect")
    if called:
        figures = {one.name: one.value for one in leak.evidence}
        assert (len(lives), lives.count(climbing)) == (figures["short_lives"], figures["growing_lives"])
        assert leak.growth is not None
        assert pytest.approx(9.0 * GIB, rel=0.05) == leak.growth.bytes_per_second * 3600.0
