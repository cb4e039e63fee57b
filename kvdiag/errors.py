"""The one exception for errors that the user can fix, and for subjects that cannot be diagnosed."""


class KvdiagError(Exception):
    """A one-line message for the user: what failed, the value, and the fix.

    The command line prints it to stderr and exits with 3 (unknown). Other failures are not dressed up as one: a bug
    stays a traceback.
    """


class KvModelError(KvdiagError):
    """A model config or a deployment whose KV-cache cost cannot be computed; `field` names what decided so."""

    def __init__(self, message: str, field: str) -> None:
        """Keep the one-line message and the config field or option it is about."""
        super().__init__(message)
        self.field = field
