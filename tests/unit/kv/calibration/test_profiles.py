"""Measured profiles: what a report gives to the byte, what a plan takes of it, and which profile fits a plan."""

from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, RankReport
from kvdiag.kv.calibration.profiles import (
    MAX_PROFILES,
    Profile,
    ProfileQuery,
    find_profile,
    measure,
    model_key,
    with_profile,
)
from kvdiag.kv.families.architecture import parse_architecture
from tests.unit.kv.calibration.profiled import LLAMA, MODEL, PROFILE, QUERY, size
from tests.unit.kv.refused import refused

SMALL = ProfileQuery(gpu_total_bytes=1000, model=MODEL, tensor_parallel=1, pipeline_parallel=1)


def measured(total_bytes: int = 1000, **parts: Any) -> Profile:
    """The profile of a small GPU."""
    return Profile(
        gpu_total_bytes=total_bytes, model=MODEL, tensor_parallel=1, pipeline_parallel=1, date="", source="", **parts
    )


@pytest.mark.parametrize(
    ("planned", "pool", "told", "expected"),
    [
        (500, 400, {}, measured(overhead_bytes=0)),
        (500, 401, {}, None),
        (500, 300, {}, measured(overhead_bytes=100)),
        (None, 300, {}, None),
        (None, 300, {"activation": 30, "non_torch": 10}, None),
        (None, 300, {"activation": 30, "consumed": 600}, None),
        (500, 300, {"weights": 480}, measured(overhead_bytes=120)),
        (500, 300, {"graphs_estimate": 40}, measured(overhead_bytes=60, graph_bytes=40)),
        (500, 300, {"activation": 50}, measured(overhead_bytes=100)),
        (500, 300, {"non_torch": 50}, measured(overhead_bytes=100)),
        (500, 300, {"activation": 50, "non_torch": 7}, measured(activation_bytes=50, context_bytes=7)),
        (
            500,
            300,
            {"activation": 50, "non_torch": 7, "graphs_estimate": 40},
            measured(activation_bytes=10, context_bytes=7, graph_bytes=40),
        ),
        (
            500,
            300,
            {"activation": 30, "non_torch": 7, "graphs_estimate": 40},
            measured(activation_bytes=0, context_bytes=7, graph_bytes=40),
        ),
        (
            None,
            300,
            {"activation": 50, "weights": 480, "consumed": 490},
            measured(activation_bytes=50, context_bytes=10),
        ),
        (500, 300, {"activation": 50, "weights": 480, "consumed": 470}, measured(activation_bytes=50, context_bytes=0)),
        (500, 300, {"peak_torch": 530, "weights": 480, "non_torch": 7}, measured(activation_bytes=50, context_bytes=7)),
        (500, 300, {"peak_torch": 470, "weights": 480, "non_torch": 7}, measured(activation_bytes=0, context_bytes=7)),
        (500, 300, {"peak_torch": 530, "consumed": 510}, measured(overhead_bytes=100)),
    ],
)
def test_what_an_engine_took(planned: int | None, pool: int, told: dict[str, int], expected: Profile | None) -> None:
    """Of 1,000 bytes 900 are the engine's, 500 of them weights and 300 the pool: 100 are left, which are split only
    where the engine reports both context and activation.
    """
    sizes: dict[str, Any] = {name: size(nominal_bytes) for name, nominal_bytes in told.items()}
    rank = RankReport(name="", pool=size(pool), **sizes)
    report = EngineReport(settings=EngineSettings(memory_fraction_ratio=0.9), ranks=(rank,))

    assert expected == measure(report, SMALL, weights_bytes=planned, pool_bytes=pool, date="", source="")


@pytest.mark.parametrize(
    ("version", "activation_bytes", "overhead_bytes", "graph_bytes", "within"),
    [("0.20.0", 50, 120, 60, False), ("0.21.0", 10, 80, 40, True)],
)
def test_graphs_count_where_the_release_keeps_them(
    version: str, activation_bytes: int, overhead_bytes: int, graph_bytes: int, within: bool
) -> None:
    """Before 0.21 the measured graph bytes, outside the fraction; since then the estimate, inside it: 0.92 x 1,000 less
    500 and 300 are 120.
    """
    bare = RankReport(name="", pool=size(300), graphs_estimate=size(40), graphs_actual=size(60))
    split = replace(bare, activation=size(50), non_torch=size(7))

    def taken(rank: RankReport) -> Profile | None:
        settings = EngineSettings(version=version, memory_fraction_ratio=0.92)
        report = EngineReport(settings=settings, ranks=(rank,))
        return measure(report, SMALL, weights_bytes=500, pool_bytes=300, date="", source="")

    graphs: dict[str, Any] = {"graph_bytes": graph_bytes, "graphs_in_fraction": within, "engine_version": version}
    assert [
        measured(context_bytes=7, activation_bytes=activation_bytes, **graphs),
        measured(overhead_bytes=overhead_bytes, **graphs),
    ] == [taken(split), taken(bare)]


def test_a_fraction_of_a_gpu_is_rounded_up() -> None:
    """0.9 x 1,001 = 900.9: 101 of 901 bytes are left after 800."""
    report = EngineReport(settings=EngineSettings(memory_fraction_ratio=0.9))

    assert measured(1001, overhead_bytes=101) == measure(
        report, replace(SMALL, gpu_total_bytes=1001), weights_bytes=500, pool_bytes=300, date="", source=""
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (10, 20, 5, 0)),
        ({"graph_bytes": None}, (10, 20, 0, 0)),
        ({"context_bytes": 0, "activation_bytes": 0}, (0, 0, 5, 0)),
        ({"graphs_in_fraction": False}, (10, 20, 0, 0)),
        ({"overhead_bytes": 70}, (0, 0, 5, 70)),
        ({"overhead_bytes": 0}, (0, 0, 5, 0)),
        ({"overhead_bytes": 70, "context_bytes": None, "activation_bytes": None, "graph_bytes": 0}, (0, 0, 0, 70)),
    ],
)
def test_what_a_plan_takes_of_a_profile(change: dict[str, Any], expected: tuple[int, ...]) -> None:
    """One overhead stands in place of context and activation; graphs count where they lie inside the fraction."""
    overheads = replace(PROFILE, **change).overheads

    assert expected == (
        overheads.context_bytes,
        overheads.activation_bytes,
        overheads.graph_bytes,
        overheads.overhead_bytes,
    )
    assert PROFILE.date in overheads.source
    assert PROFILE.source in overheads.source


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (QUERY, True),
        (replace(QUERY, gpu_name=None), True),
        (replace(QUERY, max_num_batched_tokens=8192), True),
        (replace(QUERY, max_num_batched_tokens=2048), False),
        (replace(QUERY, gpu_name="a100"), False),
        (replace(QUERY, model=replace(MODEL, digest="another")), False),
        (replace(QUERY, model=replace(MODEL, name="called otherwise")), True),
        (replace(QUERY, tensor_parallel=1), False),
        (replace(QUERY, pipeline_parallel=2), False),
    ],
)
def test_a_profile_is_of_one_gpu_model_and_ranks(query: ProfileQuery, expected: bool) -> None:
    """The total may differ by what the driver keeps; names count where both have one."""
    assert expected is (find_profile([PROFILE], query) is not None)


def test_the_newest_profile_is_taken() -> None:
    """By date, and of one day the one that was written last."""
    newer = replace(PROFILE, date="2026-02-01", max_num_batched_tokens=2048)
    last = replace(newer, max_num_batched_tokens=4096)

    assert last == find_profile([newer, last, PROFILE], QUERY)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"gpu_total_bytes": 1_050_000}, True),
        ({"gpu_total_bytes": 1_050_001}, False),
        ({"gpu_total_bytes": 950_000}, True),
        ({"gpu_total_bytes": 949_999}, False),
        ({"gpu_name": None}, True),
        ({"max_num_batched_tokens": None}, True),
    ],
)
def test_a_gpu_of_about_the_same_total_will_do(change: dict[str, Any], found: bool) -> None:
    """To 5 % of the plan's; a profile without a batch size or a GPU's name fits any."""
    assert found is (
        find_profile([replace(PROFILE, **change)], replace(QUERY, max_num_batched_tokens=8192)) is not None
    )


@pytest.mark.parametrize(
    ("change", "replaced"),
    [
        ({}, True),
        ({"date": "2026-03-01", "context_bytes": 11, "gpu_total_bytes": 990_000}, True),
        ({"gpu_name": "h200"}, False),
        ({"gpu_name": None}, False),
        ({"model": replace(MODEL, digest="another")}, False),
        ({"model": replace(MODEL, name="another")}, True),
        ({"tensor_parallel": 1}, False),
        ({"pipeline_parallel": 2}, False),
        ({"max_num_batched_tokens": 4096}, False),
    ],
)
def test_what_a_newer_profile_replaces(change: dict[str, Any], replaced: bool) -> None:
    """One of the same GPU, model, ranks and batch; GPUs without a name are identified by their totals."""
    new = replace(PROFILE, **change)

    assert ((new,) if replaced else (PROFILE, new)) == with_profile([PROFILE], new)
    nameless = replace(PROFILE, gpu_name=None)
    assert 2 == len(with_profile([nameless], replace(nameless, gpu_total_bytes=999_999)))


def test_the_oldest_profile_goes_first() -> None:
    """Of 4,096 by date, wherever it stands."""
    many = [
        replace(PROFILE, pipeline_parallel=number, date=f"{9999 - number:04}") for number in range(1, MAX_PROFILES + 1)
    ]

    kept = with_profile(many, replace(PROFILE, tensor_parallel=4))

    # The profile with the highest number has the oldest date
    assert (4096, {4096}) == (
        len(kept),
        {each.pipeline_parallel for each in many} - {each.pipeline_parallel for each in kept[:-1]},
    )


def digest(config: dict[str, Any]) -> str:
    """The digest of a config."""
    return model_key(config, parse_architecture(config), name="x").digest


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 31},
        {"num_attention_heads": 64, "head_dim": 128},
        {"num_key_value_heads": 4},
        {"hidden_size": 8192},
        {"intermediate_size": 1024},
        {"moe_intermediate_size": 1024},
        {"vocab_size": 32_000},
        {"quantization_config": {"quant_method": "awq"}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
    ],
)
def test_what_decides_weights_and_activation_makes_another_model(change: dict[str, Any]) -> None:
    """Depth, heads, widths, and how it is quantized."""
    assert digest(LLAMA) != digest(LLAMA | change)


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (
            {"model_type": "bloom", "n_layer": 24, "n_head": 16, "n_embed": 1024, "vocab_size": 250880},
            {"n_embed": 1536},
        ),
        (
            {"model_type": "moondream3", "config": {"text": {"dim": 2048, "n_layers": 24, "n_heads": 32}}},
            {"config": {"text": {"dim": 1024, "n_layers": 24, "n_heads": 32}}},
        ),
    ],
    ids=["BLOOM 560M and 1B1", "Moondream"],
)
def test_a_width_makes_another_model_whatever_its_field_is_called(
    config: dict[str, Any], width: dict[str, Any]
) -> None:
    """Two sizes of a family may be as deep as each other, with as many heads."""
    assert digest(config) != digest(config | width)


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": {"bits": 4}},
        {"quantization_config": {}},
        {"rope_theta": 1e6},
        {"max_position_embeddings": 8192, "_name_or_path": "y"},
    ],
)
def test_what_does_not_decide_leaves_the_model_the_same(change: dict[str, Any]) -> None:
    """A quantization that names no method is none."""
    assert digest(LLAMA) == digest(LLAMA | change)


def test_a_key_is_short() -> None:
    """16 hex digits, and a name of 512 characters at most."""
    key = model_key(LLAMA, parse_architecture(LLAMA), name="n" * 600)

    assert (16, 512) == (len(key.digest), len(key.name))
    assert int(key.digest, 16) >= 0


@pytest.mark.parametrize("name", ["moe_intermediate_size", "ffn_dim"])
def test_a_width_of_a_key_has_a_limit(name: str) -> None:
    """Also one that the family itself does not read: 2^26."""
    without = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    assert digest(without | {name: 2**26}) != digest(without)
    with refused(name):
        digest(without | {name: 2**26 + 1})


def test_a_key_stays_the_same() -> None:
    """Profiles that an earlier release has written are found by it."""
    assert "5f11a0db05bc0335" == digest(LLAMA)
