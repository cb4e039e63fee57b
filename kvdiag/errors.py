"""The one exception that stands for a mistake the user can mend, or a subject that cannot be diagnosed."""

from __future__ import annotations


class KvdiagError(Exception):
    """A message for the user: what is wrong and what to do next, in one line.

    The command line prints it to stderr and exits with `exit_code` (3, "could not tell", unless told otherwise).
    Nothing else of the program's failures is dressed as one: a bug stays a traceback.
    """

    def __init__(self, message: str, exit_code: int = 3) -> None:
        """Keep the one-line message and the exit code it leads to."""
        super().__init__(message)
        self.exit_code = exit_code


class KvModelError(KvdiagError):
    """A model config or a deployment whose KV-cache cost cannot be computed; `field` names what decided so."""

    def __init__(self, message: str, field: str) -> None:
        """Keep the one-line message and the config field or option it is about."""
        super().__init__(message)
        self.field = field
