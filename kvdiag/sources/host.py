"""The server's processes on this host: open ports, the processes behind one, their memory and its limit.

The server's processes are found from its address: the listener, then its parents as long as they run the same program,
then all their children, since any process of that family may leak. A process that cannot be read is left out. A server
in another PID namespace or on another machine is not visible: that is a gap, and verdicts that depend on the server's
processes are then unknown.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from urllib.parse import urlsplit

import psutil

from kvdiag.model import Gap, HostProcess

SOURCE = "host"

MAX_PROCESSES = 512
"""A server of 16 engines with 16 workers each has fewer."""

MAX_COMMAND_CHARACTERS = 2**14

MAX_STATUS_BYTES = 2**14
_SWAPPED = re.compile(rb"(?m)^VmSwap:\s{1,20}(\d{1,15}) kB$")

MAX_LIMIT_DIGITS = 20
"""Of a 64-bit number."""

MAX_PROGRAM_CHARACTERS = 64

MPI_LAUNCHERS = frozenset(("mpirun", "mpiexec", "orterun", "prterun", "mpiexec.hydra"))
"""Of Open MPI and MPICH; they start trtllm-llmapi-launch, which becomes `trtllm-serve` on rank 0, else a worker."""


def program(title: str) -> str:
    """The program name in a process title: its first word, up to an equals sign.

    A process can set its whole command line as its title (setproctitle), and NVML and psutil report that as its name.
    Arguments are dropped because they may contain keys.
    """
    word = next(iter(title.replace("\0", " ").split()), "")
    return word.partition("=")[0][:MAX_PROGRAM_CHARACTERS]


PORTS = (8000, 30000, 8080, 23333, 11434, *range(8001, 8011), 3000, 8081)
"""The defaults of vLLM, TensorRT-LLM and Dynamo's front end, of SGLang, llama.cpp and containers, LMDeploy and Ollama;
further and data-parallel servers, of which 8002 is Triton's metrics; TGI's; a Dynamo worker's in its examples.
"""

USUAL_PORTS = "8000 to 8010, 3000, 8080, 8081, 11434, 23333 or 30000"

PORT_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
MAX_PORT_TABLE_BYTES = 4 * 2**20
"""Listening sockets come first; a line has 150 bytes."""

LISTENING = "0A"
"""TCP_LISTEN (include/net/tcp_states.h)."""


def candidates(own_port: int) -> tuple[str, ...]:
    """Addresses of the usual ports that are open on this host, except `own_port`, the likeliest first.

    Other ports are not probed: they may belong to servers of another kind.
    """
    listening = {port for table in PORT_TABLES for port in _listening_ports(Path(table))}
    return tuple(f"http://127.0.0.1:{port}" for port in PORTS if port in listening and port != own_port)


def _listening_ports(table: Path) -> set[int]:
    """The ports in a table of proc_pid_net(5); psutil would look into every process's files for their owners."""
    try:
        with table.open("rb") as file:
            lines = file.read(MAX_PORT_TABLE_BYTES).decode("ascii", errors="replace").splitlines()
    except OSError:
        return set()
    rows = [line.split() for line in lines[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == LISTENING}  # noqa: PLR2004 - the column


def find_server(url: str, server_program: str) -> tuple[tuple[int, ...] | None, tuple[Gap, ...]]:
    """Process ids of the server listening at `url`: listener, parents of the same program, all their children.

    The API server listens; engine cores and workers are its children, with several API servers the children of one
    launcher. `server_program` stands in the command lines of the engine's own processes; where it
    is empty, no parent of the listener counts.
    """
    parts = urlsplit(url)
    if not is_local(parts.hostname or ""):
        return None, (not_visible(f"{parts.hostname} is another host: its processes are not visible here"),)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        listener = _listener(parts.hostname or "", port)
        if listener is None:
            return None, (not_visible(f"no process in this PID namespace listens on port {port}"),)
        top = _launcher(listener, server_program)
        family = [top, *top.children(recursive=True)]
    except psutil.Error as error:
        return None, (not_visible(f"the processes of port {port} cannot be read: {type(error).__name__}"),)
    return tuple(sorted(process.pid for process in family[:MAX_PROCESSES])), ()


def not_visible(reason: str) -> Gap:
    """The gap of something on this host that kvdiag cannot see."""
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
            if found.status != psutil.CONN_LISTEN or found.laddr.port != port:
                continue
            address = found.laddr.ip.removeprefix("::ffff:")
            if wanted is None or address in (*wanted, "0.0.0.0", "::"):  # noqa: S104 - read, not bound
                return process
    return None


def _launcher(listener: psutil.Process, server_program: str) -> psutil.Process:
    """The listener, or what started it: by the same interpreter, the engine's own launcher, or MPI for its ranks."""
    top = listener
    for parent in listener.parents() if server_program else ():
        adjacent = parent == top.parent() and _same_program(parent, top, server_program)
        if adjacent or _starts(parent, server_program):
            top = parent
    return top


def _same_program(parent: psutil.Process, child: psutil.Process, server_program: str) -> bool:
    """Whether both run the same program on the same script, or the parent is the engine's own, as TGI's launcher."""
    try:
        program_file = parent.exe()
        own = program_file == child.exe() or server_program in PurePath(program_file).name
        return own and server_program in " ".join(parent.cmdline()).lower()
    except psutil.Error:
        return False


def _starts(ancestor: psutil.Process, server_program: str) -> bool:
    """Whether a process is MPI's launcher of the engine's ranks, of which one listens; a script stands between them."""
    try:
        words = ancestor.cmdline()
        return ancestor.name() in MPI_LAUNCHERS and server_program in " ".join(words).lower()
    except psutil.Error:
        return False


NO_ENVIRONMENT = "(its environment is not readable)"
"""In front of a command line whose process belongs to another user: those variables may set anything."""


def commands(pids: Iterable[int], variables: Sequence[str] = ()) -> list[str]:
    """The processes' command lines, each cut to a length that can be searched; empty where one cannot be read.

    Those of `variables` that a process's environment sets stand in front of its command, as in a shell.
    """
    return [_command(pid, variables) for pid in pids]


def _command(pid: int, variables: Sequence[str]) -> str:
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    return f"{_environment(process, variables)}{command}"[:MAX_COMMAND_CHARACTERS]


def _environment(process: psutil.Process, variables: Sequence[str]) -> str:
    try:
        own = process.environ() if variables else {}
    except psutil.Error:
        return f"{NO_ENVIRONMENT} "
    return "".join(f"{name}={own[name]} " for name in variables if name in own)


def read(pids: Iterable[int], root: Path = Path("/")) -> tuple[tuple[HostProcess, ...] | None, tuple[Gap, ...]]:
    """Resident and anonymous bytes of the running processes; a gap if there are none."""
    found = tuple(process for pid in pids if (process := _host_process(pid, root)) is not None)
    if not found:
        return None, (Gap(SOURCE, "failed", "the server's processes have exited, or cannot be read; see its log"),)
    return found, ()


def _host_process(pid: int, root: Path) -> HostProcess | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            name, memory = process.name(), process.memory_info()
        return HostProcess(
            pid=pid,
            name=program(name),
            resident_bytes=memory.rss,
            # Linux: RssFile + RssShmem is what psutil calls shared; the rest is the process's own, anonymous memory.
            anonymous_bytes=max(memory.rss - memory.shared, 0) + _swapped_bytes(pid, root)
            if hasattr(memory, "shared")
            else None,
        )
    except (psutil.Error, ValueError):
        return None


def _swapped_bytes(pid: int, root: Path) -> int:
    """Anonymous memory that the kernel has moved to swap (proc_pid_status(5)); 0 where it reports none."""
    try:
        with (root / "proc" / str(pid) / "status").open("rb") as file:
            found = _SWAPPED.search(file.read(MAX_STATUS_BYTES))
    except OSError:
        return 0
    return 0 if found is None else int(found[1]) * 1024


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
