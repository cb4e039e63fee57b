"""What a document of profiles may hold, and how one that is none is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.calibration.profiles import MOST_PROFILES, parse_profiles, profiles_document
from tests.unit.kv.profiled import MODEL, PROFILE


def broken(change: Callable[[dict[str, Any]], object]) -> tuple[str, str | None]:
    """Message and field of the refusal of a document of one profile with one thing changed."""
    document = profiles_document([PROFILE])
    change(document)
    with pytest.raises(KvModelError) as caught:
        parse_profiles(document)
    return str(caught.value), caught.value.field


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
    with pytest.raises(KvModelError):
        parse_profiles(document)
