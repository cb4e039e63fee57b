"""Stores equal values once: most values equal those of a minute ago. Pure."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from kvdiag.model import Sample

T = TypeVar("T")

MINUTE_SECONDS = 60.0


class Interning:
    """Keeps the values of the current and the previous minute."""

    def __init__(self) -> None:
        """Start empty."""
        self._before: dict[tuple[type, Any], Any] = {}
        self._now: dict[tuple[type, Any], Any] = {}
        self._minute = -1.0

    def sample(self, sample: Sample) -> Sample:
        """An equal sample that shares its parts with earlier ones; samples come in ascending time."""
        minute = sample.at_seconds // MINUTE_SECONDS
        if minute != self._minute:
            self._minute = minute
            self._before, self._now = self._now, {}
        return self.share(sample)

    def share(self, value: T) -> T:
        """An equal value, made of stored objects where they are equal."""
        if value is None or isinstance(value, bool):
            return value
        # Numbers compare across types, and 1 is not 1.0 in a trace.
        key = (type(value), value)
        known = self._now.get(key)
        if known is None:
            known = self._before.get(key)
            if known is None:
                known = value
                if isinstance(value, tuple):
                    known = tuple(self.share(part) for part in value)
                elif is_dataclass(value) and not isinstance(value, type):
                    parts = (each.name for each in fields(value) if each.init)
                    known = replace(value, **{name: self.share(getattr(value, name)) for name in parts})
            self._now[key] = known
        return cast("T", known)
