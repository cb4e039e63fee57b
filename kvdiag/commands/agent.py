"""`kvdiag agent install DIR`: copy the agent to where a server's Python finds it, without changing its image."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import click

import kvdiag
import kvdiag.agent
from kvdiag import files as files_
from kvdiag.commands import CommandGroup
from kvdiag.errors import KvdiagError

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
