"""The server's processes as the host shows them: which they are, their resident memory, what its weights weigh.

A server in another PID namespace or on another machine is not visible: that is a gap, and every judgement that needs
to know which process is the server's then says so.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import stat
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from kvdiag.kv.families.known_keys import known_part
from kvdiag.model import Gap, HostProcess

SOURCE = "host"

MAX_PROCESSES = 512
"""A server of 16 engines with 16 workers each has fewer."""

MAX_WEIGHT_FILES = 4096

MAX_COMMAND_CHARACTERS = 2**14

MAX_OPEN_FILES = 4096
MAX_MAPS_BYTES = 8 * 2**20
"""Limits for reading one process's files."""

MAX_LIMIT_DIGITS = 20
"""Of a 64-bit number."""

MAX_PROGRAM_CHARACTERS = 64


def program(title: str) -> str:
    """The program name in a process title: its first word, up to an equals sign.

    A process can set its whole command line as its title (setproctitle), and NVML and psutil report that as its name.
    Arguments are dropped because they may contain keys.
    """
    word = next(iter(title.replace("\0", " ").split()), "")
    return word.partition("=")[0][:MAX_PROGRAM_CHARACTERS]


MAX_CONFIG_BYTES = 256 * 2**10
"""The longest config.json among those in wide use has 60 KB (a multimodal one with all its labels)."""


def find_server(url: str, server_program: str) -> tuple[tuple[int, ...] | None, tuple[Gap, ...]]:
    """Process ids of the server listening at `url`: listener, parents of the same program, all their children.

    The API server listens; engine cores and workers are its children, with several API servers the children of one
    launcher. `server_program` stands in the command lines of the engine's own processes.
    """
    parts = urlsplit(url)
    if not is_local(parts.hostname or ""):
        return None, (_unseen(f"{parts.hostname} is another host: its processes are not visible here"),)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        listener = _listener(parts.hostname or "", port)
        if listener is None:
            return None, (_unseen(f"no process in this PID namespace listens on port {port}"),)
        top = _launcher(listener, server_program)
        family = [top, *top.children(recursive=True)]
    except psutil.Error as error:
        return None, (_unseen(f"the processes of port {port} cannot be read: {type(error).__name__}"),)
    return tuple(sorted(process.pid for process in family[:MAX_PROCESSES])), ()


def _unseen(reason: str) -> Gap:
    return Gap(source=SOURCE, kind="absent", reason=reason)


def is_local(hostname: str) -> bool:
    """Whether a name or address is this host's own."""
    if hostname == "localhost":
        return True
    try:
        address = ipaddress.ip_address(hostname)
    except ValueError:
        return hostname == socket.gethostname()
    own = {found.address for addresses in psutil.net_if_addrs().values() for found in addresses}
    return address.is_loopback or str(address) in own


def _listener(hostname: str, port: int) -> psutil.Process | None:
    """Return the process that listens on this address; another user may listen on the same port of another address."""
    wanted = {"localhost": ("127.0.0.1", "::1"), socket.gethostname(): None}.get(hostname, (hostname,))
    for process in psutil.process_iter():
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue  # another user's process
        for found in connections:
            address = found.laddr.ip.removeprefix("::ffff:") if found.status == psutil.CONN_LISTEN else ""
            if address and found.laddr.port == port and (wanted is None or address in (*wanted, "0.0.0.0", "::")):  # noqa: S104 - read, not bound
                return process
    return None


def _launcher(listener: psutil.Process, server_program: str) -> psutil.Process:
    """The listener, or the process that started it when both run the same program on the same script."""
    top = listener
    while (parent := top.parent()) is not None and parent.pid > 1 and _same_program(parent, top, server_program):
        top = parent
    return top


def _same_program(parent: psutil.Process, child: psutil.Process, server_program: str) -> bool:
    try:
        return parent.exe() == child.exe() and server_program in " ".join(parent.cmdline()).lower()
    except psutil.Error:
        return False


def commands(pids: Iterable[int]) -> list[str]:
    """The processes' command lines, each cut to a length that can be searched; empty where one cannot be read."""
    return [_command(pid) for pid in pids]


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:MAX_COMMAND_CHARACTERS]
    except psutil.Error:
        return ""


def read(pids: Iterable[int]) -> tuple[tuple[HostProcess, ...] | None, tuple[Gap, ...]]:
    """Resident and anonymous bytes of the running processes; a gap if there are none."""
    found = tuple(process for pid in pids if (process := _host_process(pid)) is not None)
    if not found:
        return None, (Gap(source=SOURCE, kind="failed", reason="all of the server's processes have exited"),)
    return found, ()


def _host_process(pid: int) -> HostProcess | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            name, memory = process.name(), process.memory_info()
        return HostProcess(
            pid=pid,
            name=program(name),
            resident_bytes=memory.rss,
            # Linux: RssFile + RssShmem is what psutil calls shared; the rest is the process's own, anonymous memory.
            anonymous_bytes=max(memory.rss - memory.shared, 0) if hasattr(memory, "shared") else None,
        )
    except (psutil.Error, ValueError):
        return None


def limit_bytes(pids: Iterable[int], root: Path = Path("/")) -> int | None:
    """Host memory that the server may take: the least of the machine's and its cgroups' (v2), up to the root's.

    `None` without a process: on another machine there is another limit.
    """
    pid = next(iter(pids), None)
    if pid is None:
        return None
    limits = [psutil.virtual_memory().total]
    try:
        lines = (root / "proc" / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    group = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    mounted = root / "sys" / "fs" / "cgroup"
    for folder in () if group is None else (mounted / group, *(mounted / group).parents):
        if not folder.is_relative_to(mounted):
            break
        try:
            text = (folder / "memory.max").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue  # the root has none, nor has a group whose controller is off
        # "max" is no limit.
        if text.isdecimal() and len(text) <= MAX_LIMIT_DIGITS:
            limits.append(int(text))
    return min(limits)


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


def weights_bytes(root: str | None) -> tuple[int | None, tuple[Gap, ...]]:
    """Size on disk of the checkpoint in the folder `root`; `None` with a gap if it is not visible here.

    Sharded safetensors and torch files count; `consolidated*` repeats the same weights in Mistral's own layout
    where sharded files are there too.
    """
    folder = Path(root or "")
    try:
        if not root or not folder.is_absolute() or not folder.is_dir():
            return None, (_unseen("the model's files are not visible here: the weights' size is unknown"),)
        with os.scandir(folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in list(entries)[:MAX_WEIGHT_FILES] if entry.is_file()}
    except OSError as error:
        return None, (_unseen(f"the model's files cannot be read: {error.strerror}"),)
    for ending in (".safetensors", ".bin", ".pt", ".gguf"):
        weights = {name: size for name, size in sizes.items() if name.endswith(ending)}
        sharded = {name: size for name, size in weights.items() if not name.startswith("consolidated")}
        if weights:
            return sum((sharded or weights).values()), ()
    return None, (_unseen("the model's folder has no weight files: the weights' size is unknown"),)
