"""The catalogue that the package ships, read once."""

import functools
import json
from importlib import resources

from kvdiag.kv.fit.model_catalogue import CATALOGUE_FILE, Catalogue, CatalogueEntry, parse_catalogue


@functools.cache
def catalogue() -> Catalogue:
    """The package's catalogue."""
    text = resources.files("kvdiag.kv.fit").joinpath(CATALOGUE_FILE).read_text(encoding="utf-8")
    return parse_catalogue(json.loads(text))


def served(name: str) -> CatalogueEntry:
    """The catalogue's entry of that name, which must be there."""
    entry = catalogue().find(name)
    assert entry is not None

    return entry
