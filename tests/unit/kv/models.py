"""The catalogue that the package ships, read once."""

import functools

from kvdiag.kv.fit.model_catalogue import CatalogueEntry
from kvdiag.sources import model_files

catalogue = functools.cache(model_files.catalogue)


def served(name: str) -> CatalogueEntry:
    """The catalogue's entry of that name, which must be there."""
    entry = catalogue().find(name)
    assert entry is not None

    return entry
