"""Where a server may be listening: the usual ports that are open here, and nobody else's."""

from __future__ import annotations

import socket

import pytest

from kvdiag.sources import host
from kvdiag.sources.host import candidates


def test_open_ports_are_found_and_others_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the usual ports those on which something listens, in their order; not the daemon's own, nor any other."""
    # Three open ports, two of them usual ones, and a usual one that is closed
    with socket.socket() as one, socket.socket() as two, socket.socket() as unusual, socket.socket() as closed:
        ports = []
        for each in (one, two, unusual, closed):
            each.bind(("127.0.0.1", 0))
            ports.append(each.getsockname()[1])
        for each in (one, two, unusual):
            each.listen()
        monkeypatch.setattr(host, "PORTS", (ports[1], ports[3], ports[0]))

        assert (f"http://127.0.0.1:{ports[1]}", f"http://127.0.0.1:{ports[0]}") == candidates(own_port=1)
        assert (f"http://127.0.0.1:{ports[1]}",) == candidates(own_port=ports[0])
