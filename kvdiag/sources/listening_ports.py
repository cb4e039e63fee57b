"""Where on this host an LLM server may be listening, for those who are not told its address."""

from __future__ import annotations

from pathlib import Path

PORTS = (8000, *range(8001, 8011), 8080)
"""vLLM's default, those that second servers and data-parallel ones are given, and the usual one of containers."""

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
MAX_TABLE_BYTES = 4 * 2**20
"""Those who listen stand first in it; a line has 150 bytes."""

LISTENING = "0A"
"""TCP_LISTEN (include/net/tcp_states.h)."""


def candidates(own_port: int) -> tuple[str, ...]:
    """Addresses of the usual ports on which something listens here, `own_port` not among them, the likeliest first.

    Nobody else's port is asked: a GET is no polite question to a server of anything else.
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
