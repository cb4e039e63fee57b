"""Host memory of the server's processes, or of its container, from columns. Pure.

cAdvisor's container_memory_rss is the anonymous memory of the whole container (the cgroup's `rss`, `anon` in version
2): it stands in for the processes where none of them is told apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvdiag.feeds.history.columns import readings, rows_of
from kvdiag.feeds.history.replica_columns import Columns, Fields
from kvdiag.feeds.history.replica_gpus import Names
from kvdiag.model import HostProcess

API_SERVER = "API server"
FIRST_LIFE = 1


def host_of(
    columns: Columns, names: Names, container: str | None, tolerance_seconds: float
) -> dict[float, tuple[HostProcess, ...]]:
    """The processes at each time that one of them was read."""
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
    return readings(*rows_of(reported, tolerance_seconds), _process)


def _process(who: tuple[int, str], figures: Mapping[str, float]) -> HostProcess:
    sizes = {name: round(value) for name, value in figures.items()}
    # Two figures of two readings: what is anonymous is resident, whatever the other said a moment before.
    resident_bytes = max(sizes.get("resident_bytes", 0), sizes.get("anonymous_bytes", 0))
    return HostProcess(
        pid=who[0], name=who[1], resident_bytes=resident_bytes, anonymous_bytes=sizes.get("anonymous_bytes")
    )


def _container(columns: Columns, container: str | None) -> Mapping[str, Fields]:
    """The server's container: the one that its own series name, else the only one, else the pod as a whole."""
    seen = {key[0]: fields for key, fields in columns.of("container").items() if key[0] != "POD"}
    if container is not None and container in seen:
        return {container: seen[container]}
    inside = [name for name in seen if name]
    if len(inside) == 1:
        return {inside[0]: seen[inside[0]]}
    return {"": seen[""]} if "" in seen else {}
