"""Profiles of a server's processes as plain values, `schema_version` 1; the schema is profile.schema.json.

Bytes are integers, negative where memory shrank; unknown is null.
"""

from collections.abc import Iterable

from kvdiag.diagnosis.growth.profile_conclusion import Conclusion
from kvdiag.model import MemoryProfile, ProfiledLoad
from kvdiag.outputs.documents import Json, fields_of, plain

SCHEMA_VERSION = 1
_FIGURES = (
    *("kind", "pid", "title", "seconds", "began_monotonic_seconds", "ended_monotonic_seconds", "tracing_full"),
    *("first", "last", "stacks", "other_stacks", "other_bytes"),
)


def profile_document(
    profiles: Iterable[tuple[MemoryProfile, Conclusion]], problems: Iterable[str], load: ProfiledLoad | None
) -> Json:
    """The whole answer: one entry for each process, and why others have none."""
    return {
        "schema_version": SCHEMA_VERSION,
        "processes": [
            fields_of(conclusion, "answer", "process_growth_bytes", "traced_growth_bytes", "explained_ratio")
            | {"requests": conclusion.load.requests}
            | fields_of(profile, *_FIGURES)
            for profile, conclusion in profiles
        ],
        "requests_per_second": None if load is None else _rates(load),
        "problems": list(problems),
    }


def _rates(load: ProfiledLoad) -> Json:
    return {name: plain(getattr(load, f"{name}_per_second")) for name in ("before", "during", "after")}
