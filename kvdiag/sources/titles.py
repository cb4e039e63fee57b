"""The program name of a process title. Arguments are dropped: they may contain keys."""

from __future__ import annotations

MAX_CHARACTERS = 64


def program(title: str) -> str:
    """Return the first word of a title, up to an equals sign.

    A process can set its whole command line as its title (setproctitle); NVML and psutil report it as the process name.
    """
    word = next(iter(title.replace("\0", " ").split()), "")
    return word.partition("=")[0][:MAX_CHARACTERS]
