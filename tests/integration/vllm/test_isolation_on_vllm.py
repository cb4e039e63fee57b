"""The isolation probe against vLLM 0.32 itself: its prefix cache with salts, without, and behind a gateway."""

import json
import re
import socket
from urllib.parse import urlsplit

import pytest

from tests.fixtures.hostile import Answer, Hostile, Peer
from tests.integration.vllm.cli import Result, kvdiag
from tests.integration.vllm.engine import Engine

pytestmark = [pytest.mark.real_vllm, pytest.mark.long]


def without_salts(url: str) -> Answer:
    """A gateway that passes every request on, but for its cache_salt."""
    address = urlsplit(url)

    def answer(peer: Peer) -> None:
        body = peer.request_body
        if body:
            body = json.dumps({k: v for k, v in json.loads(body).items() if k != "cache_salt"}).encode()
        head = re.sub(rb"(?im)^(content-length|connection):.*\r\n", b"", peer.request_head + b"\r\n")
        head += b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
        with socket.create_connection((address.hostname, address.port)) as server:
            server.sendall(head + body)
            while part := server.recv(65536):
                peer.send(part)

    return answer


def shares(result: Result) -> dict[str, float]:
    """What of the prompts came from the cache, by who asked."""
    measured = result.step("isolation")["measured"]
    return {name: value for name, value in measured.items() if name.endswith("_hit_ratio")}


def cacheable(result: Result) -> set[float]:
    """All whole blocks of 128 of a prompt but its last one, as a share; a busy machine gets shorter prompts."""
    shortened = range(257, 2048) if result.step("isolation")["notes"] else ()
    return {round((tokens - 1) // 128 * 128 / tokens, 4) for tokens in (2048, *shortened)}


def test_vllm_keeps_salts_apart_and_shares_what_has_none(server: Engine) -> None:
    """By vLLM's own counters a salt keeps another tenant out, and a prompt without one is anybody's."""
    result = kvdiag("run", "--url", server.url, "--isolation", "--output", "json")
    assert (1, "suspect") == (result.code, result.finding("isolation.prefix_cache")["status"]), result.not_ok
    hit = shares(result)["own_hit_ratio"]
    expected = {"own_hit_ratio": hit, "other_salt_hit_ratio": 0.0, "other_unsalted_hit_ratio": hit}
    assert hit in cacheable(result)
    assert expected == shares(result), result.step("isolation")


def test_gateway_that_drops_salts_is_a_fault(server: Engine) -> None:
    """Where a gateway strips the salt, one tenant's cache answers another's request, which the probe sees."""
    with Hostile(without_salts(server.url)) as gateway:
        result = kvdiag("run", "--url", gateway.url, "--isolation", "--output", "json")
    finding = result.finding("isolation.prefix_cache")
    assert (2, "fault") == (result.code, finding["status"]), result.not_ok
    assert "cache_salt is ignored" in finding["summary"]
    assert shares(result)["other_salt_hit_ratio"] in cacheable(result)
