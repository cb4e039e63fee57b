"""Models that need no file: names for configs that the package ships, in models.json (which the caller reads)."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One model: its name, its aliases, and its config."""

    name: str
    aliases: Sequence[str] = ()
    config: Mapping[str, object]

    @property
    def keys(self) -> tuple[str, ...]:
        """What the model may be called, in the form in which names are compared."""
        return tuple(_key(name) for name in (self.name, *self.aliases))


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All entries, found by name, alias or Hub id, in any case."""

    entries: tuple[CatalogueEntry, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The entries' own names."""
        return tuple(entry.name for entry in self.entries)

    def find(self, name: str) -> CatalogueEntry | None:
        """The entry of that name, or None."""
        return next((entry for entry in self.entries if _key(name) in entry.keys), None)

    def find_named(self, name: str) -> CatalogueEntry | None:
        """The entry of that name, or of a Hub id that ends in it, or None."""
        own = self.find(name)
        if own is not None:
            return own
        key = _key(name)
        return next((entry for entry in self.entries if any(one.endswith(f"/{key}") for one in entry.keys)), None)

    def similar(self, name: str) -> tuple[str, ...]:
        """Names close to one that is not there."""
        known = {key: entry.name for entry in self.entries for key in entry.keys}
        close = difflib.get_close_matches(_key(name), known, n=_SUGGESTIONS, cutoff=0.5)
        return tuple(dict.fromkeys(known[key] for key in close))


def parse_catalogue(document: Mapping[str, Any]) -> Catalogue:
    """The catalogue from the package's own, parsed JSON file."""
    return Catalogue(entries=tuple(CatalogueEntry(**entry) for entry in document["models"]))


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")
