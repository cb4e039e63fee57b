"""The one error of the KV-cost model: a description that cannot be costed."""


class KvModelError(ValueError):
    """A model config or a deployment that the KV-cost model refuses.

    `field` names the field that decided so; the message is one line that a user can act on.
    """

    def __init__(self, message: str, field: str) -> None:
        """Keep the message and the field that decided."""
        super().__init__(message)
        self.message = message
        self.field = field
