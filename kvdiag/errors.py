"""The one exception for errors that the user can fix, and for subjects that cannot be diagnosed."""

from __future__ import annotations


class KvdiagError(Exception):
    """A one-line message for the user: what failed, the value, and the fix.

    The command line prints it to stderr and exits with `exit_code` (3, unknown, by default). Other failures are not
    dressed up as one: a bug stays a traceback.
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
