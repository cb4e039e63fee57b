# ruff: noqa: INP001 - a script
"""Puts `start.py` into a file that shiv has made, in the place of its own start: `python insert.py kvdiag.pyz`."""

from __future__ import annotations

import sys
from pathlib import Path
from zipfile import ZipFile

MAIN = "__main__.py"
START = Path(__file__).with_name("start.py")


def insert(pyz: Path) -> None:
    """Write the file anew: its first line, which names the interpreter, and every member but the start as it was."""
    made = pyz.with_suffix(".new")
    with ZipFile(pyz) as old, pyz.open("rb") as whole, made.open("wb") as file:
        file.write(whole.readline())
        with ZipFile(file, "w") as new:
            for member in old.infolist():
                new.writestr(member, START.read_bytes() if member.filename == MAIN else old.read(member))
    made.chmod(pyz.stat().st_mode)
    made.replace(pyz)


if __name__ == "__main__":
    insert(Path(sys.argv[1]))
