"""Turns on what SGLang's own tests do: its scheduler retracts requests every few steps, though the pool has room."""


def register() -> None:
    """Set what the module has read from the environment when it was imported."""
    from sglang.srt.managers import scheduler  # noqa: PLC0415 - the server's own Python

    scheduler.TEST_RETRACT = True
    scheduler.TEST_RETRACT_INTERVAL = 20
