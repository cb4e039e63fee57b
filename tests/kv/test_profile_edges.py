"""Profiles at their edges: what is measured to the byte, what a document may hold, and which profile is near enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.kv.architecture import parse_architecture
from kvdiag.kv.errors import KvModelError
from kvdiag.kv.profiles import (
    MOST_PROFILES,
    Measured,
    find_profile,
    measure,
    model_key,
    parse_profiles,
    profiles_document,
    with_profile,
)
from kvdiag.kv.reported import EngineReport, RankReport, Settings
from tests.kv.profiled import LLAMA, MODEL, PROFILE, QUERY, size

PIB = 1 << 50


@pytest.mark.parametrize(
    ("planned", "pool", "told", "expected"),
    [
        (500, 400, {}, Measured(overhead_bytes=0)),
        (500, 401, {}, None),
        (500, 300, {}, Measured(overhead_bytes=100)),
        (None, 300, {}, None),
        (None, 300, {"activation": 30, "non_torch": 10}, None),
        (None, 300, {"activation": 30, "consumed": 600}, None),
        (500, 300, {"weights": 480}, Measured(overhead_bytes=120)),
        (500, 300, {"graphs_estimate": 40}, Measured(overhead_bytes=60, graph_bytes=40)),
        (500, 300, {"activation": 50}, Measured(overhead_bytes=100)),
        (500, 300, {"non_torch": 50}, Measured(overhead_bytes=100)),
        (500, 300, {"activation": 50, "non_torch": 7}, Measured(activation_bytes=50, context_bytes=7)),
        (
            500,
            300,
            {"activation": 50, "non_torch": 7, "graphs_estimate": 40},
            Measured(activation_bytes=10, context_bytes=7, graph_bytes=40),
        ),
        (
            500,
            300,
            {"activation": 30, "non_torch": 7, "graphs_estimate": 40},
            Measured(activation_bytes=0, context_bytes=7, graph_bytes=40),
        ),
        (
            None,
            300,
            {"activation": 50, "weights": 480, "consumed": 490},
            Measured(activation_bytes=50, context_bytes=10),
        ),
        (500, 300, {"activation": 50, "weights": 480, "consumed": 470}, Measured(activation_bytes=50, context_bytes=0)),
        (500, 300, {"peak_torch": 530, "weights": 480, "non_torch": 7}, Measured(activation_bytes=50, context_bytes=7)),
        (500, 300, {"peak_torch": 470, "weights": 480, "non_torch": 7}, Measured(activation_bytes=0, context_bytes=7)),
        (500, 300, {"peak_torch": 530, "consumed": 510}, Measured(overhead_bytes=100)),
    ],
    ids=[
        "nothing left",
        "a byte too much",
        "one figure",
        "no weights",
        "no weights, parts told",
        "no weights, consumed told",
        "the engine's own weights",
        "graphs told",
        "no context",
        "no activation",
        "both",
        "graphs within activation",
        "graphs larger than activation",
        "context by what is consumed",
        "less consumed than the weights",
        "activation by torch's peak",
        "a peak below the weights",
        "a peak without its weights",
    ],
)
def test_what_an_engine_took(planned: int | None, pool: int, told: dict[str, int], expected: Measured | None) -> None:
    """Of 1,000 bytes 900 are the engine's, 500 of them weights and 300 the pool: 100 are left, and are told apart only
    where the engine tells both context and activation.
    """
    # GIVEN
    sizes: dict[str, Any] = {name: size(nominal_bytes) for name, nominal_bytes in told.items()}
    rank = RankReport(name="", pool=size(pool), **sizes)
    report = EngineReport(settings=Settings(memory_fraction_ratio=0.9), ranks=(rank,))

    # THEN
    assert expected == measure(report, total_bytes=1000, weights_bytes=planned, pool_bytes=pool)


@pytest.mark.parametrize(
    ("version", "activation_bytes", "overhead_bytes", "graph_bytes", "within"),
    [("0.20.0", 50, 120, 60, False), ("0.21.0", 10, 80, 40, True)],
)
def test_graphs_count_where_the_release_keeps_them(
    version: str, activation_bytes: int, overhead_bytes: int, graph_bytes: int, within: bool
) -> None:
    """Before 0.21 what they really took, beside the fraction; since then the estimate, inside it: 0.92 x 1,000 less
    500 and 300 are 120.
    """
    # GIVEN
    bare = RankReport(name="", pool=size(300), graphs_estimate=size(40), graphs_actual=size(60))
    split = replace(bare, activation=size(50), non_torch=size(7))

    def taken(rank: RankReport) -> Measured | None:
        settings = Settings(version=version, memory_fraction_ratio=0.92)
        report = EngineReport(settings=settings, ranks=(rank,))
        return measure(report, total_bytes=1000, weights_bytes=500, pool_bytes=300)

    # THEN
    assert [
        Measured(
            context_bytes=7, activation_bytes=activation_bytes, graph_bytes=graph_bytes, graphs_in_fraction=within
        ),
        Measured(overhead_bytes=overhead_bytes, graph_bytes=graph_bytes, graphs_in_fraction=within),
    ] == [taken(split), taken(bare)]


def test_a_fraction_of_a_gpu_is_rounded_up() -> None:
    """0.9 x 1,001 = 900.9: 101 of 901 bytes are left beside 800."""
    report = EngineReport(settings=Settings(memory_fraction_ratio=0.9))

    assert Measured(overhead_bytes=101) == measure(report, total_bytes=1001, weights_bytes=500, pool_bytes=300)


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
    # WHEN
    overheads = replace(PROFILE, **change).overheads

    # THEN
    assert expected == (
        overheads.context_bytes,
        overheads.activation_bytes,
        overheads.graph_bytes,
        overheads.overhead_bytes,
    )


@pytest.mark.parametrize(
    "change",
    [
        *(
            {name: size_bytes}
            for name in ("context_bytes", "activation_bytes", "graph_bytes", "overhead_bytes")
            for size_bytes in (-1, PIB + 1)
        ),
        {"gpu_total_bytes": 0},
        {"gpu_total_bytes": PIB + 1},
        {"tensor_parallel": 0},
        {"pipeline_parallel": 0},
        {"max_num_batched_tokens": -1},
        {"context_bytes": None},
        {"activation_bytes": None},
    ],
)
def test_profiles_that_cannot_be(change: dict[str, Any]) -> None:
    """Sizes beyond a pebibyte or below nothing, no GPU, no ranks, and parts that are missing."""
    with pytest.raises(KvModelError) as caught:
        replace(PROFILE, **change)

    assert "profile" == caught.value.field


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_total_bytes": 1},
        {"gpu_total_bytes": PIB},
        {"context_bytes": PIB, "activation_bytes": 0, "graph_bytes": PIB, "overhead_bytes": 0},
        {"tensor_parallel": 1, "max_num_batched_tokens": 1},
        {"context_bytes": None, "activation_bytes": None, "graph_bytes": None, "overhead_bytes": 1},
    ],
)
def test_the_bounds_themselves_are_profiles(change: dict[str, Any]) -> None:
    """One byte, a pebibyte, one rank, one token, one overhead."""
    actual = replace(PROFILE, **change)

    assert change == {name: getattr(actual, name) for name in change}


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
    """One of the same GPU, model, ranks and batch; GPUs without a name are told apart by their totals."""
    # GIVEN
    new = replace(PROFILE, **change)

    # THEN
    assert ((new,) if replaced else (PROFILE, new)) == with_profile([PROFILE], new)
    nameless = replace(PROFILE, gpu_name=None)
    assert 2 == len(with_profile([nameless], replace(nameless, gpu_total_bytes=999_999)))


def test_the_oldest_profile_goes_first() -> None:
    """Of 4,096 by date, wherever it stands."""
    # GIVEN
    many = [
        replace(PROFILE, pipeline_parallel=number, date=f"{9999 - number:04}") for number in range(1, MOST_PROFILES + 1)
    ]

    # WHEN
    kept = with_profile(many, replace(PROFILE, tensor_parallel=4))

    # THEN the profile with the highest number has the oldest date
    assert (MOST_PROFILES, {MOST_PROFILES}) == (
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
        {"moe_intermediate_size": 1024},
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
    "change", [{"quantization_config": {"bits": 4}}, {"quantization_config": {}}, {"rope_theta": 1e6}]
)
def test_what_does_not_decide_leaves_the_model_the_same(change: dict[str, Any]) -> None:
    """A quantization that names no method is none."""
    assert digest(LLAMA) == digest(LLAMA | change)


def test_a_key_is_short() -> None:
    """16 hex digits, and a name of 512 characters at most."""
    # WHEN
    key = model_key(LLAMA, parse_architecture(LLAMA), name="n" * 600)

    # THEN
    assert (16, 512) == (len(key.digest), len(key.name))
    assert int(key.digest, 16) >= 0


def broken(change: Callable[[dict[str, Any]], object]) -> tuple[str, str | None]:
    """Message and field of the refusal of a document of one profile with one thing changed."""
    document = profiles_document([PROFILE])
    change(document)
    with pytest.raises(KvModelError) as caught:
        parse_profiles(document)
    return caught.value.message, caught.value.field


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(
            (name, value, f"{name} of its profile 1 is not a int as one is written")
            for name in ("gpu_total_bytes", "tensor_parallel", "pipeline_parallel")
            for value in (None, 1.0, True, "1")
        ),
        *(
            (name, value, f"{name} of its profile 1 is not a int as one is written")
            for name in ("max_num_batched_tokens", "context_bytes", "activation_bytes", "graph_bytes", "overhead_bytes")
            for value in (1.0, True)
        ),
        *((name, None, f"{name} of its profile 1 is not a str as one is written") for name in ("date", "source")),
        *(
            (name, value, f"{name} of its profile 1 is not a str as one is written")
            for name in ("date", "source", "gpu_name", "engine_version")
            for value in (5, "x" * 513)
        ),
        ("graphs_in_fraction", None, "graphs_in_fraction of its profile 1 is not a bool as one is written"),
        ("graphs_in_fraction", 1, "graphs_in_fraction of its profile 1 is not a bool as one is written"),
    ],
)
def test_a_field_of_another_type_is_named(name: str, value: object, message: str) -> None:
    """And which profile it is of; what may be missing may not be of another type."""
    assert (message, name) == broken(lambda document: document["profiles"][0].update({name: value}))


@pytest.mark.parametrize(
    ("change", "message", "field"),
    [
        (lambda document: document.pop("profiles"), "it has no list of profiles", "profiles"),
        (lambda document: document.update(profiles={}), "it has no list of profiles", "profiles"),
        (
            lambda document: document.update(schema_version=2),
            "its schema_version is '2', and this kvdiag reads 1",
            "schema_version",
        ),
        (
            lambda document: document.pop("schema_version"),
            "its schema_version is 'None', and this kvdiag reads 1",
            "schema_version",
        ),
        (
            lambda document: document.update(schema_version="x" * 30),
            f"its schema_version is '{'x' * 20}', and this kvdiag reads 1",
            "schema_version",
        ),
        (
            lambda document: document.update(profiles=[{}] * 4097),
            "it has 4097 profiles, more than 4096",
            "profiles",
        ),
        (
            lambda document: document["profiles"].append(5),
            "its profile 2 is not an object with a model",
            "profiles",
        ),
        (
            lambda document: document["profiles"][0].pop("model"),
            "its profile 1 is not an object with a model",
            "profiles",
        ),
        (
            lambda document: document["profiles"][0]["model"].pop("digest"),
            "digest of its profile 1 is not a str as one is written",
            "digest",
        ),
        (
            lambda document: document["profiles"][0]["model"].update(name=None),
            "name of its profile 1 is not a str as one is written",
            "name",
        ),
    ],
)
def test_a_document_that_is_none_is_refused(change: Callable[[Any], object], message: str, field: str) -> None:
    """With what is wrong with it."""
    assert (message, field) == broken(change)


def test_a_document_may_hold_4096_profiles_and_texts_of_512_characters() -> None:
    """And leave out what is not known."""
    # GIVEN
    known = replace(PROFILE, gpu_name=None, max_num_batched_tokens=None, source="x" * 512)
    document = profiles_document([known])
    document["profiles"] *= MOST_PROFILES

    # THEN
    assert (known,) * MOST_PROFILES == parse_profiles(document)
    assert (1, {"digest": MODEL.digest, "name": "a model"}) == (
        document["schema_version"],
        document["profiles"][0]["model"],
    )


@pytest.mark.parametrize("document", [None, [], "profiles", 5])
def test_what_is_no_object_is_no_document(document: object) -> None:
    """A list, a text, a number, nothing."""
    with pytest.raises(KvModelError, match="it has no list of profiles"):
        parse_profiles(document)
