# ruff: noqa: INP001 - a script
"""What `kvdiag.pyz` begins with: a folder to unpack into also where there is no home that can be written to.

shiv unpacks into `$SHIV_ROOT`, else into `~/.shiv`. The user of a container often has no home, or one
that is read-only.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

EXIT_UNKNOWN = 3
"""As kvdiag's own where it could not run: Python's 1 for a traceback would say `suspect`."""


def root() -> str:
    """The folder to unpack into; where that is no lasting one, it goes with this process.

    Raises:
        OSError: there is none.

    """
    told = os.environ.get("SHIV_ROOT")
    if told:
        return told
    try:
        usual = Path("~/.shiv").expanduser()
        usual.mkdir(exist_ok=True)
        if os.access(usual, os.W_OK | os.X_OK):
            return str(usual)
    except (OSError, RuntimeError):
        pass  # no home, or none of one's own
    passing = tempfile.mkdtemp(prefix="kvdiag-")
    atexit.register(shutil.rmtree, passing, ignore_errors=True)
    return passing


if __name__ == "__main__":
    try:
        os.environ["SHIV_ROOT"] = root()
        from _bootstrap import bootstrap  # type: ignore[import-not-found]  # shiv's, inside the file

        bootstrap()
    except OSError as error:
        print(f"kvdiag: cannot unpack: {error}; set SHIV_ROOT to a folder that can be written to", file=sys.stderr)  # noqa: T201 - nothing else is unpacked
        sys.exit(EXIT_UNKNOWN)
