"""The file of measured profiles: one JSON document, written as a whole or not at all, bounded when read.

A file that cannot be used is an error, not a warning: a plan that silently went back to estimates would differ from the
last one by gigabytes. `--no-profile` plans without it.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from kvdiag import files
from kvdiag.errors import KvdiagError, KvModelError
from kvdiag.kv.calibration.profiles import Profile, parse_profiles, profiles_document
from kvdiag.sources.bounded_json import decode

MAX_FILE_BYTES = 8 * 2**20
"""Twice what the most profiles take."""


def default_path() -> Path | None:
    """`$XDG_DATA_HOME/kvdiag/profiles.json`, or the same below ~/.local/share; None where there is no home."""
    data = os.environ.get("XDG_DATA_HOME", "")
    try:
        # The specification: "All paths set in these environment variables must be absolute", others are ignored.
        base = Path(data) if Path(data).is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:
        return None
    return base / "kvdiag" / "profiles.json"


def read_profiles(path: Path, *, required: bool) -> tuple[Profile, ...]:
    """The profiles in `path`; none where it does not exist, unless it is `required`.

    Raises:
        KvdiagError: it cannot be read, or does not hold profiles.
    """
    try:
        with files.opened(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not required:
            return ()
        raise KvdiagError(f"no such profile file {path}: create it with kvdiag fit --from-log FILE") from error
    except OSError as error:
        raise KvdiagError(f"cannot read the profiles in {path}: {error.strerror}; or pass --no-profile") from error
    if len(content) > MAX_FILE_BYTES:
        raise _broken(path, f"it is larger than {MAX_FILE_BYTES // 2**20} MiB")
    try:
        return parse_profiles(decode(content))
    except KvModelError as error:
        raise _broken(path, str(error)) from error
    except ValueError as error:
        raise _broken(path, "it is not JSON") from error


def _broken(path: Path, reason: str) -> KvdiagError:
    return KvdiagError(f"{path} is not a file of profiles: {reason}; move it away, or pass --no-profile")


def write_profiles(path: Path, profiles: Sequence[Profile]) -> None:
    """Put `profiles` in place of what `path` holds, in one step. Of two writers at once the later one stays.

    Raises:
        KvdiagError: it cannot be written.
    """
    content = json.dumps(profiles_document(profiles), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, content.encode(), mode=0o600)
    except OSError as error:
        reason = error.strerror or str(error)
        raise KvdiagError(f"cannot write the profile to {path}: {reason}; pass another --profile FILE") from error
