"""Finds ports on this host on which an LLM server may listen."""

from __future__ import annotations

from pathlib import Path

PORTS = (8000, *range(8001, 8011), 8080)
"""vLLM's default, the usual ports of further and data-parallel servers, and the usual one of containers."""

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
MAX_TABLE_BYTES = 4 * 2**20
"""Listening sockets come first; a line has 150 bytes."""

LISTENING = "0A"
"""TCP_LISTEN (include/net/tcp_states.h)."""


def candidates(own_port: int) -> tuple[str, ...]:
    """Addresses of the usual ports that are open on this host, except `own_port`, the likeliest first.

    Other ports are not probed: they may belong to servers of another kind.
    """
    listening = {port for table in TABLES for port in _listening(Path(table))}
    return tuple(f"http://127.0.0.1:{port}" for port in PORTS if port in listening and port != own_port)


def _listening(table: Path) -> set[int]:
    """The ports in a table of proc_pid_net(5); psutil would look into every process's files for their owners."""
    try:
        with table.open("rb") as file:
            lines = file.read(MAX_TABLE_BYTES).decode("ascii", errors="replace").splitlines()
    except OSError:
        return set()
    rows = [line.split() for line in lines[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == LISTENING}  # noqa: PLR2004 - the column
