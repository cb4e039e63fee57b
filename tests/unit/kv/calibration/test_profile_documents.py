"""What a document of profiles may hold, and how one that is none is refused."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.errors import KvModelError
from kvdiag.kv.calibration.profiles import MAX_PROFILES, ModelKey, Profile, parse_profiles, profiles_document
from tests.unit.kv.calibration.profiled import MODEL, PROFILE
from tests.unit.kv.refused import refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu_total_bytes", 1.0),
        ("tensor_parallel", None),
        ("context_bytes", True),
        ("date", None),
        ("gpu_name", 5),
        ("graphs_in_fraction", 1),
        ("model", None),
        ("model", {"digest": "d", "name": None}),
    ],
)
def test_a_field_of_another_type_is_named(name: str, value: object) -> None:
    """And which profile it is of."""
    document = profiles_document([PROFILE, PROFILE])
    document["profiles"][1][name] = value
    assert {"profile 2", name} <= set(re.findall(r"profile 2|\w+", refusal(document).replace("ModelKey", "model")))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda document: document.pop("profiles"), "profiles"),
        (lambda document: document.update(profiles={}), "profiles"),
        (lambda document: document.update(schema_version=2), "schema_version"),
        (lambda document: document.pop("schema_version"), "schema_version"),
        (lambda document: document.update(profiles=[{}] * 4097), "profiles"),
        (lambda document: document["profiles"].append(5), "profiles"),
        (lambda document: document["profiles"][0].pop("model"), "profiles"),
        (lambda document: document["profiles"][0]["model"].pop("digest"), "profiles"),
        (lambda document: document["profiles"][0].update(source="x" * 513), "profile"),
    ],
)
def test_a_document_that_is_none_is_refused(change: Callable[[Any], object], field: str) -> None:
    """With what is wrong with it."""
    document = profiles_document([PROFILE])
    change(document)
    with refused(field):
        parse_profiles(document)
    assert "x" * 21 not in refusal({"schema_version": "x" * 21, "profiles": []})


def test_a_document_may_hold_4096_profiles_and_texts_of_512_characters() -> None:
    """And leave out what is not known."""
    known = replace(PROFILE, gpu_name=None, max_num_batched_tokens=None, source="x" * 512)
    document = profiles_document([known])
    document["profiles"] *= MAX_PROFILES

    assert (known,) * MAX_PROFILES == parse_profiles(document)
    assert (1, {"digest": MODEL.digest, "name": "a model"}) == (
        document["schema_version"],
        document["profiles"][0]["model"],
    )


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
