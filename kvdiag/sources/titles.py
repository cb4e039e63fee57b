"""What of a process's title may be shown and kept: its program. Arguments, which may hold keys, are not."""

from __future__ import annotations

MAX_CHARACTERS = 64


def program(title: str) -> str:
    """The first word of a title, and nothing of what is assigned in it: a process can call itself by its whole command.

    So do programs that use setproctitle, and NVML and psutil tell it as they do the name of a program.
    """
    word = next(iter(title.replace("\0", " ").split()), "")
    return word.partition("=")[0][:MAX_CHARACTERS]
