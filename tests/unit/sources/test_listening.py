"""The addresses on which a server may listen: the usual ports that are open on this host, and no other process's."""

import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress

import pytest

from kvdiag.sources.host import PORTS, candidates

pytestmark = pytest.mark.xdist_group("usual ports")


def bound(stack: ExitStack, ports: Iterable[int]) -> list[socket.socket]:
    """A socket on each of these ports that no other program has."""
    found = []
    for port in ports:
        each = stack.enter_context(socket.socket())
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            each.bind(("127.0.0.1", port))
            found.append(each)
    return found


def test_open_ports_are_found_and_others_left_alone() -> None:
    """Of the usual ports those on which something listens, in their order; not the daemon's own, nor any other."""
    with ExitStack() as stack:
        one, two, closed = bound(stack, PORTS)[:3]
        (unusual,) = bound(stack, [0])
        for each in (two, one, unusual):
            each.listen()
        own, other, silent, strange = (each.getsockname()[1] for each in (one, two, closed, unusual))

        urls = [f"http://127.0.0.1:{port}" for port in (own, other)]
        assert urls == [url for url in candidates(own_port=1) if url in urls]
        assert set(urls) - set(candidates(own_port=own)) == {urls[0]}
        assert {f"http://127.0.0.1:{port}" for port in (silent, strange)}.isdisjoint(candidates(own_port=1))
