"""Names for models that need no file."""

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.fit.model_catalogue import Catalogue, CatalogueEntry, parse_catalogue
from tests.unit.kv.models import catalogue


def test_the_catalogue_holds_the_forty_most_served() -> None:
    """There are at least forty models, each parses, and no two have a name in common."""
    kinds = [parse_architecture(entry.config).kinds for entry in catalogue().entries]

    assert len(kinds) >= 44
    assert all(kinds)
    keys = [key for entry in catalogue().entries for key in entry.keys]
    assert len(keys) == len(set(keys))
    assert {"llama-7b", "llama-13b", "llama-70b", "mixtral-8x7b", "qwen/qwen3-32b"} <= set(keys)


SMALL = {"model_type": "llama"}
SHELF = Catalogue(
    entries=(
        CatalogueEntry(name="red_7b", aliases=["acme/red-7b", "acme/rouge"], config=SMALL),
        CatalogueEntry(name="red_13b", config=SMALL),
        CatalogueEntry(name="red_70b", config=SMALL),
        CatalogueEntry(name="red_140b", config=SMALL),
        CatalogueEntry(name="blue-9b", config=SMALL),
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

    actual = parse_catalogue({"models": [one, {"name": "red_13b", "config": SMALL}]})

    assert SHELF.entries[:2] == actual.entries
