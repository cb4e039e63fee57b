"""What a document of profiles may hold, and how one that is none is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.calibration.profiles import MOST_PROFILES, parse_profiles, profiles_document
from tests.unit.kv.calibration.profiled import MODEL, PROFILE


def broken(change: Callable[[dict[str, Any]], object]) -> tuple[str, str | None]:
    """Message and field of the refusal of a document of one profile with one thing changed."""
    document = profiles_document([PROFILE])
    change(document)
    with pytest.raises(KvModelError) as caught:
        parse_profiles(document)
    return str(caught.value), caught.value.field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("gpu_total_bytes", "tensor_parallel", "pipeline_parallel")
            for value in (None, 1.0, True, "1")
        ),
        *(
            (name, value)
            for name in ("max_num_batched_tokens", "context_bytes", "activation_bytes", "graph_bytes", "overhead_bytes")
            for value in (1.0, True)
        ),
        *((name, None) for name in ("date", "source")),
        *((name, value) for name in ("date", "source", "gpu_name", "engine_version") for value in (5, "x" * 513)),
        ("graphs_in_fraction", None),
        ("graphs_in_fraction", 1),
    ],
)
def test_a_field_of_another_type_is_named(name: str, value: object) -> None:
    """And which profile it is of; what may be missing may not be of another type."""
    message, field = broken(lambda document: document["profiles"][0].update({name: value}))

    assert (name, True) == (field, "profile 1" in message)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda document: document.pop("profiles"), "profiles"),
        (lambda document: document.update(profiles={}), "profiles"),
        (
            lambda document: document.update(schema_version=2),
            "schema_version",
        ),
        (
            lambda document: document.pop("schema_version"),
            "schema_version",
        ),
        (
            lambda document: document.update(schema_version="x" * 30),
            "schema_version",
        ),
        (
            lambda document: document.update(profiles=[{}] * 4097),
            "profiles",
        ),
        (
            lambda document: document["profiles"].append(5),
            "profiles",
        ),
        (
            lambda document: document["profiles"][0].pop("model"),
            "profiles",
        ),
        (
            lambda document: document["profiles"][0]["model"].pop("digest"),
            "digest",
        ),
        (
            lambda document: document["profiles"][0]["model"].update(name=None),
            "name",
        ),
    ],
)
def test_a_document_that_is_none_is_refused(change: Callable[[Any], object], field: str) -> None:
    """With what is wrong with it."""
    assert field == broken(change)[1]


def test_a_document_may_hold_4096_profiles_and_texts_of_512_characters() -> None:
    """And leave out what is not known."""
    known = replace(PROFILE, gpu_name=None, max_num_batched_tokens=None, source="x" * 512)
    document = profiles_document([known])
    document["profiles"] *= MOST_PROFILES

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
