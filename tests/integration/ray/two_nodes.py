"""A Ray cluster of two nodes with so many processors each, run by the Python of `ray_env`.

Its address is printed; then commands come by stdin, one a line, and each is answered by `done`: `kill` ends the second
node without a goodbye, with the processes that run tasks on it; `add` starts another one; `version TEXT` makes the
cluster one of another Python. It ends with its stdin.
"""

import contextlib
import json
import socket
import sys
import time
from typing import Any

from ray._private import services
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

STORE_BYTES = 100 * 2**20
START_SECONDS = 300.0
"""For a node to be there. Ray itself waits for half a minute, which a busy machine needs."""

_get_node = services.get_node


def _patient(*arguments: Any) -> Any:
    """Ray's description of a node, waited for."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return _get_node(*arguments)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def main() -> None:
    """Start it, and do what is asked."""
    services.get_node = _patient
    cluster = Cluster(initialize_head=True, head_node_args=_node())
    second: Any = cluster.add_node(**_node())
    _answer(cluster.address)
    for line in sys.stdin:
        command, _, text = line.strip().partition(" ")
        if command == "kill":
            cluster.remove_node(second, allow_graceful=False)
        elif command == "add":
            second = cluster.add_node(**_node())
        elif command == "version":
            _pretend(cluster.address, text)
        _answer("done")
    cluster.shutdown()


def _node() -> dict[str, Any]:
    """A node with ports for its agents: those that they choose are waited for, but not for long."""
    with contextlib.ExitStack() as stack:
        names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
        sockets = {name: stack.enter_context(socket.create_server(("", 0))) for name in names}
        ports = {name: bound.getsockname()[1] for name, bound in sockets.items()}
    return {"num_cpus": int(sys.argv[1]), "object_store_memory": STORE_BYTES, "include_dashboard": False, **ports}


def _pretend(address: str, python: str) -> None:
    """Let the cluster say that it was started by another Python."""
    client = GcsClient(address=address)
    known = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", b"cluster"))
    client.internal_kv_put(
        b"CLUSTER_METADATA", json.dumps(known | {"python_version": python}).encode(), True, b"cluster"
    )


def _answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
