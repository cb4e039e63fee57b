"""What `kvdiag doctor` looks at: whether each source can be read here, and what to change where it cannot.

Each file judges what one source has shown, and looks at nothing itself: `kvdiag/commands/doctor.py` does. An id is
`source.question`, and stays the same from version to version.
"""

from kvdiag.checks.check import Check, Outcome, worst

__all__ = ["Check", "Outcome", "worst"]
