"""Host memory of the server's processes, or of its container, from columns. Pure.

cAdvisor's container_memory_rss is the anonymous memory of the whole container (the cgroup's `rss`, `anon` in version
2): it stands in for the processes where none of them is told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvdiag.feeds.history.columns import Column, side_by_side
from kvdiag.feeds.history.replica_columns import Columns, Fields
from kvdiag.feeds.history.replica_gpus import Names
from kvdiag.model import HostProcess

API_SERVER = "API server"
FIRST_LIFE = 1


def host_of(
    columns: Columns, names: Names, container: str | None, tolerance_seconds: float
) -> tuple[Sequence[float], list[tuple[HostProcess, ...] | None]]:
    """The processes at each moment that one of them was read."""
    processes = {key[0]: fields for key, fields in columns.of("host").items()}
    named = {who: fields for who, fields in processes.items() if who}
    reported: dict[tuple[int, str], Fields] = {
        (names.pids[who], who.removesuffix(f" {names.pids[who]}")): fields for who, fields in named.items()
    }
    if not any("anonymous_bytes" in fields for fields in named.values()):
        reported |= {
            (FIRST_LIFE, f"container {who}".rstrip()): one for who, one in _container(columns, container).items()
        }
        if "" in processes and not named:
            reported[FIRST_LIFE, API_SERVER] = processes[""]
    flat: dict[tuple[tuple[int, str], str], Column] = {
        (who, name): column for who, fields in reported.items() for name, column in fields.items()
    }
    times, rows = side_by_side(flat, tolerance_seconds)
    found: list[tuple[HostProcess, ...] | None] = []
    for place in range(len(times)):
        row = []
        for pid, name in reported:
            resident = _at(rows.get(((pid, name), "resident_bytes")), place)
            anonymous = _at(rows.get(((pid, name), "anonymous_bytes")), place)
            if resident is None and anonymous is None:
                continue
            # Two figures of two readings: what is anonymous is resident, whatever the other said a moment before.
            whole = max(resident or 0, anonymous or 0)
            row.append(HostProcess(pid=pid, name=name, resident_bytes=whole, anonymous_bytes=anonymous))
        found.append(tuple(row) or None)
    return times, found


def _at(values: Sequence[float | None] | None, place: int) -> int | None:
    value = None if values is None else values[place]
    return None if value is None else round(value)


def _container(columns: Columns, container: str | None) -> Mapping[str, Fields]:
    """The server's container: the one that its own series name, else the only one, else the pod as a whole."""
    seen = {key[0]: fields for key, fields in columns.of("container").items() if key[0] != "POD"}
    if container is not None and container in seen:
        return {container: seen[container]}
    inside = [name for name in seen if name]
    if len(inside) == 1:
        return {inside[0]: seen[inside[0]]}
    return {"": seen[""]} if "" in seen else {}
