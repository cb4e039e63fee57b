"""Lives of a server by hand: a process that leaks or not, an outage, the next one."""

from collections.abc import Sequence
from dataclasses import replace

from kvdiag.diagnosis import diagnose
from kvdiag.model import Device, Diagnosis, Facts, Gap, Sample, Timeline
from tests.builders.values import engine, pool

KNOWN = Facts(url="http://127.0.0.1:8000", engine_name="vllm", pools=(pool(),), server_pids=(7,))
LEAKED_BLOCKS = 301
REFUSED = Gap("engine", "failed", "cannot connect: connection refused")


def life(begin: float, blocks: int, *, tokens: int = 0, samples: int = 20) -> tuple[Sample, ...]:
    """An idle server that holds so many blocks and counts a token a second."""
    return tuple(
        Sample(
            at_seconds=begin + second,
            engines=(replace(engine(usage=blocks / 6144), prompt_tokens_total=tokens + second),),
        )
        for second in range(samples)
    )


def outage(begin: float, samples: int = 20, devices: tuple[Device, ...] | None = None) -> tuple[Sample, ...]:
    """A server that does not answer."""
    return tuple(
        Sample(at_seconds=begin + second, devices=devices if second else None, gaps=(REFUSED,))
        for second in range(samples)
    )


def judged(*parts: Sequence[Sample], known: Facts = KNOWN, earlier: tuple[tuple[float, Facts], ...] = ()) -> Diagnosis:
    """The diagnosis of these samples, one after the other."""
    return diagnose(Timeline(samples=tuple(one for part in parts for one in part), earlier_facts=earlier), known)
