"""`kvdiag agent`: `install` copies the agent to where a server's Python finds it, `profile` asks which lines allocate.

A profile costs the server something, which is printed before it begins; its measured cost is part of the result.
"""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

import kvdiag
import kvdiag.agent
from kvdiag import files as files_
from kvdiag.commands import EXIT_UNKNOWN, CommandGroup
from kvdiag.commands.connect import base_url, open_client
from kvdiag.commands.interruption import interruptible
from kvdiag.commands.options.common import ServerAccess, Within, agent_option, output_option, server_access
from kvdiag.commands.printing import print_json, print_text, show_turns
from kvdiag.diagnosis.growth.profile_conclusion import conclude
from kvdiag.engines import recognise
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.profiling import Profiled, chosen_processes, profile_processes
from kvdiag.formatting import format_duration
from kvdiag.model import MAX_PROFILE_SECONDS, MIN_PROFILE_SECONDS, ProfileKind
from kvdiag.outputs.documents.profile_document import profile_document
from kvdiag.outputs.terminal.profile_text import render_profiles
from kvdiag.sources.agents.agent_profiles import ProfileFolder
from kvdiag.sources.agents.agent_publication import Publication
from kvdiag.sources.http import HttpReader

PACKAGE = "kvdiag_agent"
"""The agent's name outside kvdiag, which may be installed in the same Python in another version."""

SITE = "sitecustomize"
ENTRY_POINTS = f"[vllm.general_plugins]\n{PACKAGE} = {PACKAGE}:register\n"
METADATA = f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: {kvdiag.__version__}\n"
FILE_MODE, FOLDER_MODE = 0o644, 0o755
"""Independent of the umask: the server often runs as another user than the container that copies the agent."""


@click.group(cls=CommandGroup)
def command() -> None:
    """Manage the agent, which runs inside the server's processes and reports torch's allocator."""


@command.command(short_help="Install the agent; print the environment variables to set.")
@click.argument("directory", type=click.Path(path_type=Path))
def install(directory: Path) -> None:
    """Install the agent into DIRECTORY and print the environment variables that the server needs.

    The agent needs no other package: DIRECTORY can be a volume that the server's container mounts. When memory runs
    out, the agent writes a black box, a file for `kvdiag diagnose --postmortem`.
    """
    directory = directory.absolute()
    if os.pathsep in str(directory):
        raise KvdiagError(f"cannot install into {directory}: PYTHONPATH cannot hold a path with {os.pathsep!r}")
    try:
        for name, content in files().items():
            _write(directory / name, content)
    except OSError as error:
        raise KvdiagError(f"cannot install into {directory}: {error.strerror}") from error
    click.echo(f"KVDIAG_AGENT_DIR={directory / 'published'}\nPYTHONPATH={directory}")
    click.echo(
        f"Set both for vLLM, then give `--agent-dir {directory / 'published'}` to kvdiag.\n"
        f"For other torch servers: PYTHONPATH={directory / SITE}:{directory}\n"
        f"If VLLM_PLUGINS is set, add {PACKAGE} to it.",
        err=True,
    )


@command.command(short_help="Show which lines of the server's code hold the memory that it gains.")
@agent_option
@click.option("--url", help="The server, for its requests per second and the growth per request.")
@server_access
@click.option(
    "--seconds",
    type=Within(MIN_PROFILE_SECONDS, MAX_PROFILE_SECONDS),
    default=60.0,
    show_default=True,
    help="How long to trace.",
)
@click.option("--host/--device", default=True, help="Python's memory on the host [default], or torch's on GPUs.")
@click.option("--process", "role", metavar="ROLE", help="Only processes with this in their title, or with this pid.")
@output_option
def profile(
    agent_dir: Path | None,
    url: str | None,
    access: ServerAccess,
    seconds: float,
    host: bool,
    role: str | None,
    output: str,
) -> int:
    """Trace allocations in the server's processes, and show which lines of code hold what they gained.

    The server should be under its usual load. Memory that is live at the end and was not at a quarter of the time
    is shown by stack, with the share of the process's growth that it explains. Where Python explains none of it,
    the growth is native: malloc arenas, tensors on the CPU, NCCL, a transport.

    Tracing slows Python code that allocates much by 1.5 to 4 times, takes about 50 MiB at most in each process, and
    holds its interpreter twice, for 0.2 s at most. On Python before 3.12.9 or 3.13.2 its end may crash the process
    (CPython gh-128679). It ends by itself. --device keeps the stack of each of torch's
    allocations instead.
    """
    if agent_dir is None:
        raise click.UsageError("give the agents' directory by --agent-dir, as printed by `kvdiag agent install`")
    kind: ProfileKind = "host" if host else "device"
    folder = ProfileFolder(agent_dir)
    try:
        processes = chosen_processes(folder, agent_dir, role)
        with show_turns() as show:
            names = ", ".join(f"{one.title} {one.pid}" for one in processes)
            show(f"tracing {names} for {format_duration(seconds)}: slows Python, takes up to 50 MiB in each")
            found = interruptible(_profiled(folder, processes, kind, seconds, url, access, show))
    except KeyboardInterrupt as error:
        raise KvdiagError("interrupted: tracing was ended, no profile") from error
    finally:
        folder.close()
    return _shown(found, output)


async def _profiled(
    folder: ProfileFolder,
    processes: Sequence[Publication],
    kind: ProfileKind,
    seconds: float,
    url: str | None,
    access: ServerAccess,
    show: Callable[[str], None],
) -> tuple[Profiled, ...]:
    if url is None:
        return await profile_processes(folder, processes, kind, seconds, progress=show)
    async with open_client(base_url(url), access) as client:
        engine = await recognise(HttpReader(client))
        return await profile_processes(folder, processes, kind, seconds, client=engine, progress=show)


def _shown(found: Sequence[Profiled], output: str) -> int:
    profiles = [conclude(one.profile) for one in found if one.profile is not None]
    problems = [one.problem for one in found if one.problem is not None]
    if output == "json":
        print_json(profile_document(profiles, problems))
    elif profiles:
        print_text(render_profiles(profiles))
    for problem in problems:
        click.echo(problem, err=True)
    return 0 if profiles else EXIT_UNKNOWN


def files() -> Mapping[str, bytes]:
    """Return what is installed, by path: the package, vLLM's entry point, and sitecustomize for other servers."""
    source = Path(kvdiag.agent.__file__).parent
    package = {path.name: path.read_bytes() for path in sorted(source.glob("*.py"))}
    site = package.pop(f"{SITE}.py")
    info = f"{PACKAGE}-{kvdiag.__version__}.dist-info"
    return {
        **{f"{PACKAGE}/{name}": content for name, content in package.items()},
        f"{info}/METADATA": METADATA.encode(),
        f"{info}/entry_points.txt": ENTRY_POINTS.encode(),
        f"{SITE}/{SITE}.py": site,
    }


def _write(path: Path, content: bytes) -> None:
    """Replace a file as a whole: a server may be starting from the version before."""
    _make_folder(path.parent)
    # Another user who can write here could have created the package's directory, and could then replace what the server
    # imports.
    if (owner := path.parent.lstat().st_uid) not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"{path.parent} belongs to user {owner}")
    files_.replace(path, content, mode=FILE_MODE, link=False)


def _make_folder(path: Path) -> None:
    """Make a folder, and those that it is in, where there is none; modes of folders that are there stay."""
    if not path.exists():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        made = files_.folder(path, link=False)
        try:
            os.fchmod(made, FOLDER_MODE)
        finally:
            os.close(made)
