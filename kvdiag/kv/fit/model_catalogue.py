"""Models that need no file: names for configs that the package ships, in models.json (which the caller reads)."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from kvdiag.errors import KvModelError
from kvdiag.kv.families.config_fields import Fields

CATALOGUE_FILE = "models.json"
_FORMAT = 1
_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One model: its name, its aliases, and its config."""

    name: str
    aliases: tuple[str, ...]
    config: Mapping[str, object]

    def __post_init__(self) -> None:
        if not self.name or not self.config:
            raise KvModelError("a catalogue entry needs a name and a config", "models")


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All entries, found by name, alias or Hub id, in any case."""

    entries: tuple[CatalogueEntry, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for entry in self.entries:
            for name in (entry.name, *entry.aliases):
                key = _key(name)
                if key in seen:
                    raise KvModelError(f"the catalogue names {name!r} twice", "models")
                seen.add(key)

    @property
    def names(self) -> tuple[str, ...]:
        """The entries' own names."""
        return tuple(entry.name for entry in self.entries)

    def find(self, name: str) -> CatalogueEntry | None:
        """The entry of that name, or None."""
        key = _key(name)
        return next(
            (entry for entry in self.entries if key in {_key(known) for known in (entry.name, *entry.aliases)}), None
        )

    def similar(self, name: str) -> tuple[str, ...]:
        """Names close to one that is not there."""
        known = {_key(alias): entry.name for entry in self.entries for alias in (entry.name, *entry.aliases)}
        close = difflib.get_close_matches(_key(name), known, n=_SUGGESTIONS, cutoff=0.5)
        return tuple(dict.fromkeys(known[key] for key in close))


def parse_catalogue(document: Mapping[str, object]) -> Catalogue:
    """The catalogue from its parsed JSON file."""
    fields = Fields(document)
    if fields.integer("catalogue") != _FORMAT:
        raise KvModelError(f"{CATALOGUE_FILE} must have format {_FORMAT}", "catalogue")
    entries: list[CatalogueEntry] = []
    for entry in fields.children("models") or ():
        config = entry.raw("config")
        name = entry.text("name")
        if name is None or not isinstance(config, Mapping):
            raise entry.error("config", "is not a model config")
        entries.append(CatalogueEntry(name=name, aliases=entry.strings("aliases") or (), config=config))
    return Catalogue(entries=tuple(entries))


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-")
