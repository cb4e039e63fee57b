"""SGLang's fraction: its default by device, and the two opposite remedies."""

from typing import Any

import pytest

from kvdiag.kv.fit.overheads import Overheads
from kvdiag.kv.fit.plan import Demand, Outcome
from kvdiag.kv.pools.engine_plan import EnginePlan, Machine
from kvdiag.kv.pools.static_fraction import plan_tokens, resolved, vision_ratio
from kvdiag.kv.pools.token_cells import TokenSettings
from tests.unit.kv.pools.recorded_engines import config, sglang_model

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("gpu_mib", "ranks", "latent", "fraction"),
    [
        # By hand: (device - max(512 + 1.5 x 8192 + tp/8 x 1024 + 2 x 256 + 58 graphs x 8, 10240)) / device.
        (81_559, 1, False, round((81_559 - (512 + 12_288 + 128 + 512 + 58 * 8)) / 81_559, 3)),
        (81_559, 8, True, round((81_559 - (512 + 12_288 + 1_024 + 1_024 + 1_536)) / 81_559, 3)),
        (23_028, 1, False, round((23_028 - (512 + 6_144 + 128 + 96 + 50 * 8)) / 23_028, 3)),
        (15_360, 1, False, round((15_360 - (512 + 3_072 + 128 + 16 + 42 * 8)) / 15_360, 3)),
    ],
)
def test_the_default_fraction(gpu_mib: int, ranks: int, latent: bool, fraction: float) -> None:
    """What SGLang computes where --mem-fraction-static is not given (arg_groups/memory_hook.py)."""
    settings = resolved(TokenSettings(tensor_parallel=ranks), gpu_mib * MIB, latent=latent)

    assert settings.mem_fraction_static == fraction


@pytest.mark.parametrize(
    ("encoder", "ratio"),
    # By hand: 0.95 x (1 - 0.1 x (layers x width^2 / (24 x 1,024^2) - 1)), within 0.95 x 0.8 and 0.95 x 1.05.
    # A start of 0.5.23 on a CPU, where the fraction is 0.95 before, printed 0.947625 for a width of 512.
    [
        ((None, 512), 0.947625 / 0.95),
        ((24, 1_152), 0.95 * (1 - 0.1 * (1_152**2 / 1_024**2 - 1))),
        ((63, 3_200), 0.95 * 0.8),
        ((None, None), 0.95),
    ],
)
def test_an_encoder_for_images_lowers_the_default_fraction(
    encoder: tuple[int | None, int | None], ratio: float
) -> None:
    """By its size against ViT-L/14 (memory_hook.py::adjust_mem_fraction_for_vlm)."""
    alone = resolved(TokenSettings(), 81_559 * MIB, latent=False)
    beside = resolved(TokenSettings(vision_ratio=vision_ratio(*encoder)), 81_559 * MIB, latent=False)

    assert (beside.mem_fraction_static or 0) / (alone.mem_fraction_static or 1) == pytest.approx(ratio)


def planned(*, activation: int = GIB, weights: int = 16 * GIB, requests: int = 1, **settings: Any) -> EnginePlan:
    """An 8B model on 24 GiB."""
    overheads = Overheads(context_bytes=GIB // 2, activation_bytes=activation, graph_bytes=0)
    machine = Machine(24 * GIB, lambda ranks, *_: (weights // ranks,), lambda *_: overheads)
    model = sglang_model(config("Llama-3.1-8B"), context_tokens=4_096, **settings)
    return plan_tokens(model, Demand(context_tokens=4_096, requests=requests), machine=machine)


def test_too_small_a_fraction_is_to_be_raised() -> None:
    """Weights beyond the fraction: the server cannot start, and a higher fraction is the first lever."""
    found = planned(mem_fraction_static=0.6)

    assert found.outcome is Outcome.DOES_NOT_FIT
    assert found.shortfall_bytes > 0
    flag, value = found.levers[0].change.split()
    assert (flag, float(value) > 0.6) == ("--mem-fraction-static", True)


def test_too_large_a_fraction_is_to_be_lowered() -> None:
    """Activations beyond what the fraction leaves: out of memory under load, and a lower one is the first lever."""
    found = planned(mem_fraction_static=0.93, activation=3 * GIB)

    assert found.outcome is Outcome.TIGHT
    assert found.reserve_shortfall_bytes > 0
    flag, value = found.levers[0].change.split()
    assert (flag, float(value) < 0.93) == ("--mem-fraction-static", True)


def test_the_parts_add_up_to_the_gpu() -> None:
    """Nothing of the GPU is left out."""
    found = planned(mem_fraction_static=0.85)

    assert sum(part.bytes for part in found.parts) == found.gpu_bytes
    assert found.outcome is Outcome.FITS


def test_requests_share_the_pool() -> None:
    """The most requests of a context, and the headroom that turns negative beyond them."""
    found = planned(mem_fraction_static=0.85)
    beyond = planned(mem_fraction_static=0.85, requests=found.max_requests + 1)

    assert found.max_requests == found.capacity_tokens // 4_096
    assert beyond.outcome is Outcome.DOES_NOT_FIT
    assert beyond.headroom_bytes < 0


@pytest.mark.parametrize(
    ("settings", "gpus"), [({"replicas": 2}, 2), ({"attention_parallel": 2, "tensor_parallel": 2}, 2)]
)
def test_requests_are_spread_over_data_parallel_groups(settings: dict[str, int], gpus: int) -> None:
    """Each group has a pool of its own: two hold twice the requests, and their capacity is that of both."""
    alone = planned(mem_fraction_static=0.85, weights=8 * GIB)
    both = planned(mem_fraction_static=0.85, weights=8 * GIB, requests=2 * alone.max_requests, **settings)

    assert both.gpus == gpus
    assert both.max_requests >= 2 * alone.max_requests
    assert both.capacity_tokens >= 2 * alone.capacity_tokens
    assert both.admits_demand
