"""imbalance.rank: what a rank holds beyond the others, priced in tokens of the pool."""

from __future__ import annotations

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.imbalance_rank import judge
from kvdiag.model import Finding
from tests.builders import GIB, GPU_LOST, MIB, NO_NVML, World, evidence, facts, pool, run


def verdict(world: World) -> Finding:
    """The rule's one finding."""
    (found,) = judge(run(world), facts(world), DEFAULT_LIMITS)
    return found


def test_rank_that_holds_more_costs_every_rank_its_tokens() -> None:
    """One of two ranks with 2 GiB more keeps 1 GiB from the pool: 512 blocks of 16 tokens."""
    # WHEN
    actual = verdict(World(gpus=2, rank_extra_bytes={1: 2 * GIB}))

    # THEN
    sentence = "the rank on GPU 1 holds 1.00 GiB more than the mean, which costs the pool 8,192 tokens"
    assert ("suspect", sentence) == (actual.status, actual.summary)
    assert {"beyond_the_mean": GIB, "kv_tokens_lost": 8192}.items() <= evidence(actual).items()


@pytest.mark.parametrize(
    ("world", "sentence"),
    [
        (World(), "one GPU: there is nothing to balance"),
        (World(gpus=2), "2 ranks hold the same, to within 0 B"),
        (World(gpus=2, rank_extra_bytes={0: 200 * MIB}), "2 ranks hold the same, to within 100 MiB"),
    ],
    ids=["one rank", "even", "nearly even"],
)
def test_even_ranks_are_ok(world: World, sentence: str) -> None:
    """A single rank, and ranks within 2 % of a device, are balanced."""
    # WHEN
    actual = verdict(world)

    # THEN
    assert ("ok", sentence) == (actual.status, actual.summary)


@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (World(nvml=NO_NVML), NO_NVML.reason),
        (World(nvml=GPU_LOST), GPU_LOST.reason),
        (World(gpus=2, server_seen=False), "which GPUs are the server's is not visible"),
        (World(gpus=2, server_bytes_told=False), "the bytes of one of the server's ranks are not told"),
        (
            World(gpus=2, pools=(pool("0"), pool("1"))),
            "2 engines share the GPUs, and which is on which is not told",
        ),
    ],
    ids=["no NVML", "GPU lost", "server not seen", "bytes not told", "two engines"],
)
def test_ranks_that_cannot_be_compared_are_unknown(world: World, reason: str) -> None:
    """Without every rank's bytes, or with several engines, nothing is compared."""
    # WHEN
    actual = verdict(world)

    # THEN
    assert ("unknown", f"cannot tell: {reason}") == (actual.status, actual.summary)
