"""Names for models that need no file."""

from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.fit.model_catalogue import Catalogue, CatalogueEntry, parse_catalogue
from tests.unit.kv.models import catalogue
from tests.unit.kv.refused import refused


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("LLAMA-70B", "llama_70b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("qwen/qwen3-32b", "qwen3-32b"),
        *((name, name) for name in ("llama_7b", "llama_13b", "mixtral_8x7b")),
        ("no such model", None),
    ],
)
def test_names_are_found_in_any_case(asked: str, expected: Any) -> None:
    """A name, an alias or a Hub id finds its entry, whatever the case; another finds none."""
    entry = catalogue().find(asked)

    assert expected == (None if entry is None else entry.name)


def test_close_names_are_suggested() -> None:
    """A misspelt name gets the nearest ones."""
    assert "qwen3-32b" in catalogue().similar("qwen3_32")


def test_the_catalogue_holds_the_forty_most_served() -> None:
    """There are at least forty models, and each parses."""
    kinds = [parse_architecture(entry.config).kinds for entry in catalogue().entries]

    assert len(kinds) >= 44
    assert all(kinds)


SMALL = {"model_type": "llama"}
SHELF = Catalogue(
    entries=(
        CatalogueEntry(name="red_7b", aliases=("acme/red-7b", "acme/rouge"), config=SMALL),
        CatalogueEntry(name="red_13b", aliases=(), config=SMALL),
        CatalogueEntry(name="red_70b", aliases=(), config=SMALL),
        CatalogueEntry(name="red_140b", aliases=(), config=SMALL),
        CatalogueEntry(name="blue-9b", aliases=(), config=SMALL),
    )
)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("red_7b", "red_7b"),
        ("  RED-7B ", "red_7b"),
        ("acme/red_7b", "red_7b"),
        ("acme/rouge", "red_7b"),
        ("Blue_9B", "blue-9b"),
        ("red", None),
        ("", None),
    ],
)
def test_a_dash_an_underscore_and_a_space_around_make_no_difference(asked: str, expected: str | None) -> None:
    """As people type names; a part of a name is not a name."""
    entry = SHELF.find(asked)

    assert expected == (None if entry is None else entry.name)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # Three at most, nearest first, each once, by its own name whichever of its names was close.
        ("red_1", ("red_13b", "red_140b", "red_7b")),
        ("acme/rouge2", ("red_7b",)),
        ("quite different", ()),
    ],
)
def test_suggestions_are_few_and_by_their_own_names(asked: str, expected: tuple[str, ...]) -> None:
    """What a command line can show on one line."""
    assert expected == SHELF.similar(asked)


def test_names_are_the_entries_own() -> None:
    """In the file's order, without aliases."""
    assert ("red_7b", "red_13b", "red_70b", "red_140b", "blue-9b") == SHELF.names


def test_a_document_is_read_whole() -> None:
    """Name, aliases (none unless there are) and config of each entry."""
    one = {"name": "red_7b", "aliases": ["acme/red-7b", "acme/rouge"], "config": SMALL}

    actual = parse_catalogue({"catalogue": 1, "models": [one, {"name": "red_13b", "config": SMALL}]})

    assert SHELF.entries[:2] == actual.entries


def test_a_catalogue_may_be_empty() -> None:
    """A file without models has none."""
    assert () == parse_catalogue({"catalogue": 1}).entries


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({}, "catalogue"),
        ({"catalogue": 2}, "catalogue"),
        ({"catalogue": 1, "models": ["a"]}, "models[0]"),
        ({"catalogue": 1, "models": [{"name": "a", "config": SMALL}, {"name": "b"}]}, "models[1].config"),
        ({"catalogue": 1, "models": [{"config": SMALL}]}, "models[0].config"),
        ({"catalogue": 1, "models": [{"name": "", "config": SMALL}]}, "models"),
        ({"catalogue": 1, "models": [{"name": "a", "config": {}}]}, "models"),
        ({"catalogue": 1, "models": [{"name": "a-b", "config": SMALL}, {"name": "A_B", "config": SMALL}]}, "models"),
        (
            {
                "catalogue": 1,
                "models": [{"name": "a", "config": SMALL}, {"name": "b", "aliases": ["a"], "config": SMALL}],
            },
            "models",
        ),
    ],
)
def test_a_broken_catalogue_names_the_place(document: dict[str, Any], field: str) -> None:
    """The entry that is no model, or the list with two of one name."""
    with refused(field):
        parse_catalogue(document)
