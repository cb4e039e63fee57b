"""The files of the model that a server loaded: its folder, its config.json and the size of its weights.

The folder comes from an HTTP response of the server, which must not decide which files kvdiag reads: it counts only if
one of the server's processes was started with it or has a file of it open.
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import psutil

from kvdiag.kv.families.known_keys import known_part
from kvdiag.model import Gap
from kvdiag.sources.host import not_visible

MAX_CONFIG_BYTES = 256 * 2**10
"""The longest config.json among those in wide use has 60 KB (a multimodal one with all its labels)."""

MAX_WEIGHT_FILES = 4096

MAX_OPEN_FILES = 4096
MAX_MAPS_BYTES = 8 * 2**20
"""Limits for reading one process's files."""


def model_folder(root: str | None, pids: Iterable[int]) -> str | None:
    """Return the model folder that a server reports, if one of its processes was started with it or uses a file in it.

    `None` for any other folder: an HTTP answer must not decide which files kvdiag reads.
    """
    try:
        folder = Path(root or "").resolve(strict=True)
        if not root or not Path(root).is_absolute() or not folder.is_dir():
            return None
    except (OSError, ValueError, RuntimeError):
        return None
    return root if any(_names(pid, root) or _has_open(pid, folder) for pid in pids) else None


def model_file(path: str | None, pids: Iterable[int]) -> Path | None:
    """The model's one file that a server reports, under the same condition; relative to its process's folder."""
    for pid in pids if path else ():
        with contextlib.suppress(psutil.Error, OSError, ValueError, RuntimeError):
            file = Path(psutil.Process(pid).cwd(), path or "").resolve(strict=True)
            if file.is_file() and (_names(pid, path or "") or _has_open(pid, file.parent)):
                return file
    return None


def _names(pid: int, root: str) -> bool:
    """Return whether a process's command line names a folder, alone or as `--model=FOLDER`."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    wanted = os.path.normpath(root)
    return any(os.path.normpath(text) == wanted for word in words for text in (word, word.partition("=")[2]) if text)


def _has_open(pid: int, folder: Path) -> bool:
    """Return whether a process has a file of a folder open or mapped, as far as /proc shows it."""
    own = Path("/proc") / str(pid)
    files: set[str] = set()
    with contextlib.suppress(OSError), os.scandir(own / "fd") as descriptors:
        for descriptor in islice(descriptors, MAX_OPEN_FILES):
            with contextlib.suppress(OSError):
                files.add(os.readlink(descriptor.path))  # noqa: PTH115 - of thousands
    with contextlib.suppress(OSError), (own / "maps").open("rb") as maps:
        # proc_pid_maps(5): the path is the sixth field.
        fields = [os.fsdecode(line).split(maxsplit=5) for line in maps.read(MAX_MAPS_BYTES).splitlines()]
        files.update(each[5] for each in fields if len(each) > 5)  # noqa: PLR2004 - as above
    return any(os.path.dirname(file) == str(folder) for file in files)  # noqa: PTH120 - as above


def model_config(root: str | None) -> str | None:
    """Return the known fields of a model's config.json, as JSON; `None` if it is not visible or not a config."""
    path = Path(root or "") / "config.json"
    if not root or not path.is_absolute():
        return None
    try:
        file = os.open(_inside(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return None  # a pipe would be waited for
            content = opened.read(MAX_CONFIG_BYTES + 1)
        kept = known_part(json.loads(content)) if len(content) <= MAX_CONFIG_BYTES else None
        return None if kept is None else json.dumps(kept)
    except (OSError, ValueError, RecursionError, RuntimeError):
        return None


def _inside(path: Path) -> Path:
    """The file's real path, in its folder or among the blobs of a Hub cache snapshot; OSError for any other place."""
    file = path.resolve(strict=True)
    folder = path.parent.resolve()
    if file.parent not in (folder, folder.parent.parent / "blobs"):
        raise PermissionError(f"{path} is a link out of its folder")
    return file


def weights_bytes(root: str | None) -> tuple[int | None, tuple[Gap, ...]]:
    """Size on disk of the checkpoint in the folder `root`; `None` with a gap if it is not visible here.

    Sharded safetensors and torch files count; `consolidated*` repeats the same weights in Mistral's own layout
    where sharded files are there too.
    """
    folder = Path(root or "")
    try:
        if not root or not folder.is_absolute() or not folder.is_dir():
            return None, (not_visible("the model's files are not visible here: the weights' size is unknown"),)
        with os.scandir(folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in islice(entries, MAX_WEIGHT_FILES) if entry.is_file()}
    except OSError as error:
        return None, (not_visible(f"the model's files cannot be read: {error.strerror}"),)
    for ending in (".safetensors", ".bin", ".pt", ".gguf"):
        weights = {name: size for name, size in sizes.items() if name.endswith(ending)}
        sharded = {name: size for name, size in weights.items() if not name.startswith("consolidated")}
        if weights:
            return sum((sharded or weights).values()), ()
    return None, (not_visible("the model's folder has no weight files: the weights' size is unknown"),)
