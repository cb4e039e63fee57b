"""`--check-fix`: a simulated server once as it is and once with the flags of a fix, and which verdicts these end."""

import shlex
from collections.abc import Sequence

from kvdiag.commands.drill import drilled
from kvdiag.errors import KvdiagError
from kvdiag.model import Diagnosis
from kvdiag.outputs.presentation import problems_of

FIRST_FIX = "first"
"""What stands for the flags of the first fix of the worst finding."""


def given_flags(given: str, scenario: str) -> tuple[str, ...] | None:
    """The flags as they were given, checked before any run; `None` for the first fix, which is not known yet.

    Raises:
        KvdiagError: they cannot be split into words, are none, or a simulated server does not take them.
    """
    return None if given == FIRST_FIX else _split(given, scenario)


def first_fix(before: Diagnosis, scenario: str) -> tuple[str, ...]:
    """The flags of the first fix that the verdict prescribes.

    Raises:
        KvdiagError: no fix is prescribed, or a simulated server does not take its flags.
    """
    fixes = [one.prescription.first for one in problems_of(before.findings) if one.prescription is not None]
    changes = [fix.change for fix in fixes if fix is not None]
    if not changes:
        raise KvdiagError("--check-fix: no finding of the first run has a computed fix; give the flags to check")
    # A setting of the server's environment is one, too; all else is for a person to do.
    typed = [change for change in changes if change.startswith("-") or "=" in change.partition(" ")[0]]
    if not typed:
        raise KvdiagError(f"--check-fix: the first fix is no flag of the server: {changes[0]}; give the flags to check")
    return _split(typed[0], scenario)


def _split(given: str, scenario: str) -> tuple[str, ...]:
    try:
        flags = tuple(shlex.split(given))
    except ValueError as error:
        raise KvdiagError(f"--check-fix {given[:80]!r}: {error}; write the flags as for the server") from error
    if not any(flags):
        raise KvdiagError(
            f"--check-fix is empty: give flags of the server, or {FIRST_FIX!r} for the first computed fix"
        )
    try:
        drilled(scenario, flags)
    except KvdiagError as error:
        raise KvdiagError(f"--check-fix: {error}") from error
    return flags


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
