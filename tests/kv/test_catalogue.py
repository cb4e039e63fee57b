"""Names for models that need no file."""

from typing import Any

import pytest

from kvdiag.kv.architecture import parse_architecture
from kvdiag.kv.catalogue import Catalogue, CatalogueEntry, parse_catalogue
from kvdiag.kv.errors import KvModelError
from tests.kv.models import catalogue, served


@pytest.mark.parametrize("name", ["llama_7b", "llama_13b", "llama_70b", "mixtral_8x7b"])
def test_the_missions_models_are_there(name: str) -> None:
    """The names of the mission's calculator are known."""
    assert name == served(name).name


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("LLAMA-70B", "llama_70b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("qwen/qwen3-32b", "qwen3-32b"),
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


def test_a_name_can_stand_for_one_model_only() -> None:
    """Two entries of one name cannot be constructed."""
    entry = CatalogueEntry(name="a", aliases=("b",), config={"model_type": "llama"})

    with pytest.raises(KvModelError):
        Catalogue(entries=(entry, CatalogueEntry(name="B", aliases=(), config={"model_type": "llama"})))


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"catalogue": 2, "models": []},
        {"catalogue": 1, "models": [{"name": "a"}]},
        {"catalogue": 1, "models": [{"config": {"a": 1}}]},
        {"catalogue": 1, "models": ["a"]},
        {"catalogue": 1, "models": [{"name": "", "config": {"a": 1}}]},
    ],
)
def test_a_broken_catalogue_is_refused(document: dict[str, Any]) -> None:
    """Another format, or entries without name or config, are errors."""
    with pytest.raises(KvModelError):
        parse_catalogue(document)
