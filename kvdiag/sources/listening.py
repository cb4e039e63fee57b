"""Where on this host an LLM server may be listening, for those who are not told its address."""

from __future__ import annotations

import psutil

PORTS = (8000, *range(8001, 8011), 8080)
"""vLLM's default, those that second servers and data-parallel ones are given, and the usual one of containers."""


def candidates(own_port: int) -> tuple[str, ...]:
    """Addresses of the usual ports on which something listens here, `own_port` not among them, the likeliest first.

    Nobody else's port is asked: a GET is no polite question to a server of anything else.
    """
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return ()
    listening = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN and one.laddr}
    return tuple(f"http://127.0.0.1:{port}" for port in PORTS if port in listening and port != own_port)
