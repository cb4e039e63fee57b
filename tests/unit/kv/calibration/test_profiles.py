"""Measured profiles: what a report gives of one, its JSON form, and which one a plan takes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.errors import KvModelError
from kvdiag.kv.calibration.engine_report import GIB, EngineReport, EngineSettings, RankReport
from kvdiag.kv.calibration.profiles import (
    MOST_PROFILES,
    MeasuredOverheads,
    ModelKey,
    Profile,
    ProfileQuery,
    find_profile,
    measure,
    model_key,
    parse_profiles,
    profiles_document,
    with_profile,
)
from kvdiag.kv.families.architecture import parse_architecture
from tests.unit.kv.calibration.profiled import LLAMA, MODEL, PROFILE, QUERY, size


def measured(rank: RankReport, settings: EngineSettings) -> MeasuredOverheads | None:
    """What a report of one rank gives on a GPU of 80 GiB, with a pool of 50 and planned weights of 15."""
    report = EngineReport(settings=settings, ranks=(replace(rank, pool=size(50 * GIB)),))
    return measure(report, total_bytes=80 * GIB, weights_bytes=15 * GIB, pool_bytes=50 * GIB)


def test_consumed_memory_gives_the_context() -> None:
    """0.27 and later: consumed is weights and context; activation has the graphs' estimate in it."""
    rank = RankReport(
        name="",
        weights=size(15 * GIB),
        consumed=size(16 * GIB),
        activation=size(3 * GIB),
        graphs_estimate=size(GIB),
        graphs_actual=size(2 * GIB),
    )

    assert MeasuredOverheads(context_bytes=GIB, activation_bytes=2 * GIB, graph_bytes=GIB) == measured(
        rank, EngineSettings(version="0.32.0")
    )


def test_v0_tells_every_part() -> None:
    """Its graphs lie outside the memory fraction."""
    rank = RankReport(
        name="", weights=size(15 * GIB), non_torch=size(GIB), activation=size(3 * GIB), graphs_actual=size(2 * GIB)
    )

    assert MeasuredOverheads(
        context_bytes=GIB, activation_bytes=3 * GIB, graph_bytes=2 * GIB, graphs_in_fraction=False
    ) == measured(rank, EngineSettings(version="0.8.5"))


def test_a_peak_of_torch_is_weights_and_activation() -> None:
    """0.6.4 tells the peak alone."""
    rank = RankReport(name="", weights=size(15 * GIB), peak_torch=size(17 * GIB), non_torch=size(GIB))
    found = measured(rank, EngineSettings(version="0.6.4"))

    assert found is not None
    assert (GIB, 2 * GIB) == (found.context_bytes, found.activation_bytes)


def test_what_is_not_told_apart_stays_one_figure() -> None:
    """Weights and pool alone: 0.9 x 80 - 15 - 50 = 7 GiB of overhead, and no split is made up."""
    found = measured(RankReport(name="", weights=size(15 * GIB)), EngineSettings(memory_fraction_ratio=0.9))

    assert MeasuredOverheads(overhead_bytes=7 * GIB) == found


def test_planned_weights_serve_where_the_engine_tells_none() -> None:
    """A metrics page has no weights."""
    found = measured(RankReport(name=""), EngineSettings(memory_fraction_ratio=0.9))

    assert MeasuredOverheads(overhead_bytes=7 * GIB) == found


def test_more_than_the_fraction_gives_measures_nothing() -> None:
    """15 + 50 GiB in 0.5 x 80: one of the figures is another GPU's."""
    assert measured(RankReport(name=""), EngineSettings(memory_fraction_ratio=0.5)) is None


def test_overheads_of_a_profile_name_their_source() -> None:
    """What a plan is made with, and where it comes from."""
    overheads = PROFILE.overheads

    assert (10, 20, 5, 0, "measured: profile of 2026-01-02, log x.log") == (
        overheads.context_bytes,
        overheads.activation_bytes,
        overheads.graph_bytes,
        overheads.overhead_bytes,
        overheads.source,
    )


def test_graphs_outside_the_fraction_take_nothing_from_the_pool() -> None:
    """As the engine that was measured does."""
    assert 0 == replace(PROFILE, graphs_in_fraction=False).overheads.graph_bytes


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (QUERY, True),
        (replace(QUERY, gpu_total_bytes=1_010_000), True),
        (replace(QUERY, gpu_name=None), True),
        (replace(QUERY, max_num_batched_tokens=8192), True),
        (replace(QUERY, max_num_batched_tokens=2048), False),
        (replace(QUERY, gpu_name="a100"), False),
        (replace(QUERY, gpu_total_bytes=1_190_000), False),
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


def test_a_new_profile_replaces_its_own_kind() -> None:
    """Same GPU, model, ranks and batch."""
    other = replace(PROFILE, tensor_parallel=1)
    new = replace(PROFILE, date="2026-03-01")

    assert (other, new) == with_profile([PROFILE, other], new)


def test_there_are_never_too_many() -> None:
    """The oldest go."""
    many = [replace(PROFILE, pipeline_parallel=number, date=f"{number:05}") for number in range(1, MOST_PROFILES + 1)]

    kept = with_profile(many, replace(PROFILE, date="99999"))

    assert (MOST_PROFILES, "99999") == (len(kept), kept[-1].date)


def test_a_model_is_its_shape_and_not_its_name() -> None:
    """Names, paths and the longest context do not count; width, vocabulary and quantization do."""

    def key(**changes: object) -> str:
        changed = LLAMA | changes
        return model_key(changed, parse_architecture(changed), name="x").digest

    same = {key(), key(max_position_embeddings=8192, _name_or_path="y")}
    others = {key(vocab_size=32_000), key(intermediate_size=1024), key(quantization_config={"quant_method": "fp8"})}

    assert (1, 3, set()) == (len(same), len(others), same & others)


SIZES = st.integers(0, 1 << 50)
PROFILES = st.builds(
    Profile,
    gpu_total_bytes=st.integers(1, 1 << 50),
    gpu_name=st.none() | st.text(max_size=20),
    model=st.builds(ModelKey, digest=st.text(max_size=20), name=st.text(max_size=20)),
    tensor_parallel=st.integers(1, 4096),
    pipeline_parallel=st.integers(1, 4096),
    max_num_batched_tokens=st.none() | st.integers(1, 1 << 30),
    context_bytes=SIZES,
    activation_bytes=SIZES,
    graph_bytes=st.none() | SIZES,
    overhead_bytes=st.none() | SIZES,
    graphs_in_fraction=st.booleans(),
    engine_version=st.none() | st.text(max_size=20),
    date=st.text(max_size=20),
    source=st.text(max_size=20),
)


@given(st.lists(PROFILES, max_size=5).map(tuple))
def test_the_json_form_loses_nothing(profiles: tuple[Profile, ...]) -> None:
    """Written and read they are equal."""
    assert profiles == parse_profiles(json.loads(json.dumps(profiles_document(profiles))))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)


@given(st.sampled_from(sorted(profiles_document([PROFILE])["profiles"][0])), JSON)
def test_any_field_may_be_wrong(name: str, value: object) -> None:
    """A document with one field replaced by anything is read, or refused in one sentence."""
    document = profiles_document([PROFILE])
    document["profiles"][0][name] = value
    assert "\n" not in refusal(document)


def refusal(document: object) -> str:
    """Why a document is refused; nothing where it is read."""
    try:
        parse_profiles(document)
    except KvModelError as error:
        return str(error)
    return ""


@given(JSON)
def test_any_document_may_be_wrong(document: object) -> None:
    """The same for whole documents."""
    assert "\n" not in refusal(document)
