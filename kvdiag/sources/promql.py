"""Writes selectors of PromQL."""

import re
from collections.abc import Iterable, Sequence

from kvdiag.sources.prometheus_names import escaped


def any_of(label: str, values: Sequence[str], *, ending: str = "") -> str:
    """A matcher for any of these values, written so that the server can use its index.

    `ending` is a regular expression that may follow each of them.
    """
    # Escaped for RE2's regular expressions, then for a string of PromQL.
    texts = "|".join(re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", value) + ending for value in values)
    quoted = texts.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{label}=~"{quoted}"'


def named(names: Iterable[str]) -> str:
    """A matcher for metrics of any of these names, also where they are stored escaped."""
    names = set(names)
    return any_of("__name__", sorted(names | set(map(escaped, names))))


def selector(*matchers: str) -> str:
    """A vector selector from the non-empty matchers."""
    return "{" + ",".join(matcher for matcher in matchers if matcher) + "}"
