"""`--check-fix`: a simulated server once as it is and once with the flags of a fix, and which verdicts these end."""

import shlex
from collections.abc import Sequence

from kvdiag.errors import KvdiagError
from kvdiag.model import Diagnosis
from kvdiag.outputs.presentation import problems_of

FIRST_FIX = "first"
"""What stands for the flags of the first fix of the worst finding."""


def fix_flags(given: str, before: Diagnosis | None) -> tuple[str, ...]:
    """The flags as they were given, or those of the first fix that the verdict prescribes.

    Raises:
        KvdiagError: they cannot be split into words, or no fix is prescribed.
    """
    if given == FIRST_FIX:
        problems = [] if before is None else problems_of(before.findings)
        fixes = [one.prescription.first for one in problems if one.prescription is not None]
        given = next((fix.change for fix in fixes if fix is not None), "")
        if not given:
            raise KvdiagError("--check-fix: no finding of the first run has a computed fix; give the flags to check")
    try:
        return tuple(shlex.split(given))
    except ValueError as error:
        raise KvdiagError(f"--check-fix {given[:80]!r}: {error}; write the flags as for the server") from error


def checked(before: Diagnosis, after: Diagnosis, flags: Sequence[str]) -> str:
    """Which verdicts the flags have ended, which remain, and which are new, in one line."""
    was, now = ([one.id for one in problems_of(each.findings)] for each in (before, after))
    groups = {
        "ended": [one for one in was if one not in now],
        "remains": [one for one in was if one in now],
        "new": [one for one in now if one not in was],
    }
    found = "; ".join(f"{', '.join(ids)}: {word}" for word, ids in groups.items() if ids)
    return f"with {shlex.join(flags)}: {found or 'no fault before or after'}"
