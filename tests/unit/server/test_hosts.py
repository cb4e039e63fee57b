"""An open port of this machine answers its clients alone: a web page that has its name rebound does not get in."""

import asyncio

import pytest

from kvdiag.server.connections import Access, WebServer
from kvdiag.server.endpoints import Pages
from kvdiag.server.request import parse_request
from tests.unit.outputs.test_metrics import snapshot
from tests.unit.server.shell import Shell

OWN = (
    "localhost",
    "localhost:9743",
    "LOCALHOST:1",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:18080",
    "127.8.9.10:1",
    "[::1]",
    "[::1]:9743",
)
FOREIGN = (
    "evil.example",
    "evil.example:9743",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "evil.example@localhost",
    "0.0.0.0:9743",
    "10.0.0.1",
    "[fe80::1]",
    "[::]",
    "127.1",
    "localhost, evil.example",
    "localhost:9743:evil",
    "localhost evil.example",
    "x",
)


def answered(serving: Shell, path: str, *hosts: str) -> int:
    """The status of a request with these Host headers."""
    lines = "".join(f"Host: {host}\r\n" for host in hosts)
    return asyncio.run(serving.exchange(f"GET {path} HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())).status


@pytest.mark.parametrize("host", OWN)
def test_clients_of_this_machine_are_answered(serving: Shell, host: str) -> None:
    """By every name and address of loopback, and with the port of any forwarder to ours."""
    assert 200 == answered(serving, "/-/ready", host)


@pytest.mark.parametrize("host", FOREIGN)
def test_another_host_is_refused(serving: Shell, host: str) -> None:
    """On every page."""
    assert [421] * 3 == [answered(serving, path, host) for path in ("/", "/metrics", "/api/v1/ledger")]


def test_a_second_host_header_does_not_help(serving: Shell) -> None:
    """Two are no valid request, whichever comes first (RFC 9112, 3.2)."""
    assert 400 == answered(serving, "/", "localhost", "evil.example")
    assert 400 == answered(serving, "/", "evil.example", "localhost")


def test_a_port_with_passwords_or_for_other_machines_takes_any_host() -> None:
    """Behind a proxy, or in a pod, names of all kinds are right."""

    async def allow(authorization: str, address: str) -> bool:
        return (authorization, address) == ("", "127.0.0.1")

    async def status(listen: str, access: Access) -> bytes:
        web = WebServer(Pages(newest=snapshot))
        web.access = access
        port = await web.start(listen, 0)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /-/ready HTTP/1.1\r\nHost: kvdiag.example\r\nConnection: close\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return answer[9:12]
        finally:
            await web.stop()

    assert b"200" == asyncio.run(status("127.0.0.1", Access(allow=allow)))
    assert b"200" == asyncio.run(status("0.0.0.0", Access()))  # noqa: S104 - what is tested
    assert b"421" == asyncio.run(status("127.0.0.1", Access(headers=(("X-Frame-Options", "deny"),))))


@pytest.mark.parametrize("name", ["Authorization", "aUTHORIZATION"])
def test_a_password_is_not_kept_with_its_request(name: str) -> None:
    """Others are: a scraper sends the same head each time."""
    head = f"GET / HTTP/1.1\r\nHost: a\r\n{name}: Basic eDp5\r\n\r\n".encode()
    open_head = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"

    assert (parse_request(head) is parse_request(head), parse_request(open_head) is parse_request(open_head)) == (
        False,
        True,
    )


@pytest.mark.parametrize("target", ["//elsewhere/metrics", "/metrics#", "/metrics;x"])
def test_a_path_is_the_one_that_was_sent(target: str) -> None:
    """A proxy that allows or denies by path has read the same one."""
    assert target == parse_request(f"GET {target}?name%5B%5D=up HTTP/1.1\r\nHost: here\r\n\r\n".encode()).path
