"""Profiles of a server's processes as plain values, `schema_version` 1; the schema is profile.schema.json.

Bytes are integers, negative where memory shrank; unknown is null. A diagnosis has the same entries.
"""

from collections.abc import Iterable

from kvdiag.model import ConcludedProfile
from kvdiag.outputs.documents import Json, fields_of

SCHEMA_VERSION = 1
_FIGURES = (
    *("kind", "pid", "title", "seconds", "began_monotonic_seconds", "ended_monotonic_seconds", "tracing_full"),
    *("first", "last", "stacks", "other_stacks", "other_bytes", "load"),
)


def profile_document(profiles: Iterable[ConcludedProfile], problems: Iterable[str]) -> Json:
    """The whole answer: one entry for each process, and why others have none."""
    return {
        "schema_version": SCHEMA_VERSION,
        "processes": [profile_entry(one) for one in profiles],
        "problems": list(problems),
    }


def profile_entry(one: ConcludedProfile) -> Json:
    """One process."""
    answer = fields_of(one, "answer", "process_growth_bytes", "traced_growth_bytes", "explained_ratio")
    return answer | fields_of(one.profile, *_FIGURES)
