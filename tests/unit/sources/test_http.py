"""Reading from servers that are not there, are something else, or mean harm: one line each, within the deadline."""

import asyncio
import gzip
import re
import ssl
import zlib
from pathlib import Path

import httpx2
import pytest

from kvdiag.commands.connect import open_client
from kvdiag.commands.options.common import ServerAccess
from kvdiag.sources.http import MAX_ANSWER_BYTES, Answer, HttpReader, Unreadable
from tests.builders.answers import containing
from tests.fixtures import hostile
from tests.fixtures.certificates import Certificate, make_certificate
from tests.fixtures.hostile import Hostile, endless, head, raw, refused_port, reply, reply_json, silent

LONG_SECONDS = 60.0
SHORT_SECONDS = 0.5
MIB = 2**20

Reading = Answer | tuple[str, int | None, str]


TRUST = ssl.create_default_context()
"""The system's authorities, loaded once: that takes longer than most of these tests."""


def read(url: str, *, seconds: float = LONG_SECONDS, verify: ssl.SSLContext | bool = TRUST) -> Reading:
    """The answer at `url`, or kind, status and reason of the failure; details that vary by version are dropped."""

    async def get() -> Reading:
        async with httpx2.AsyncClient(base_url=url, trust_env=False, verify=verify, timeout=LONG_SECONDS) as client:
            try:
                async with asyncio.timeout(LONG_SECONDS):
                    return await HttpReader(client, seconds).get("/metrics/", params=[("name[]", "x")])
            except Unreadable as error:
                return error.kind, error.status, re.sub(r" \(.*\)", " (…)", str(error))

    return asyncio.run(get())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate from an authority that no client trusts."""
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def test_answer_is_read_whole() -> None:
    """A well-behaved answer comes with its text, its type and who sent it."""
    page = reply("vllm:x 1.0 é\n", content_type="Text/Plain; version=0.0.4", Server="uvicorn")
    with Hostile({"/metrics/": page}) as server:
        actual = read(server.url)
    assert Answer(text="vllm:x 1.0 é\n", content_type="text/plain; version=0.0.4", server="uvicorn") == actual


def test_bytes_that_are_no_text_are_replaced() -> None:
    """Bytes that are not UTF-8 are replaced and the rest is read, whichever charset the server claims."""
    page = reply(b"a\xff\xfeb", content_type="text/plain; charset=base64")
    with Hostile(page) as server:
        actual = read(server.url)
    assert Answer(text="a\ufffd\ufffdb", content_type="text/plain; charset=base64", server=None) == actual


CHECK = "check the URL"
BROKE_OFF = ("failed", None, "the connection was lost (…)")
PACKED = ("refused", None, "is compressed (…)")
GZIP_BOMB = gzip.compress(bytes(64 * MIB))
CUT_CHUNKS = head(Transfer_Encoding="chunked") + b"5\r\nhello\r\n"

ANSWERS = [
    pytest.param(reply("", status=404), ("absent", 404, f"404 on /metrics/: {CHECK}"), id="404"),
    pytest.param(reply("", status=401), ("refused", 401, "KVDIAG_API_KEY"), id="401"),
    pytest.param(reply("", status=403), ("refused", 403, "KVDIAG_API_KEY"), id="403"),
    pytest.param(
        reply("", status=302, Location="http://127.0.0.1:1/"),
        ("refused", 302, f"302 on /metrics/: {CHECK}"),
        id="redirect is not followed",
    ),
    pytest.param(reply("", status=500), ("failed", 500, f"500 on /metrics/: {CHECK}"), id="500"),
    pytest.param(reply("", status=204), ("refused", 204, f"204 on /metrics/: {CHECK}"), id="204"),
    pytest.param(raw(), BROKE_OFF, id="hangs up at once"),
    pytest.param(raw(b"SSH-2.0-OpenSSH_9.2\r\n"), BROKE_OFF, id="another protocol"),
    pytest.param(raw(bytes(range(256)) * 9), BROKE_OFF, id="garbage bytes"),
    pytest.param(raw(b"HTTP/1.1 200 OK\r\nBad Header\r\n\r\n"), BROKE_OFF, id="bad header"),
    pytest.param(raw(head(Content_Length="100"), b"short"), BROKE_OFF, id="torn body"),
    pytest.param(raw(head(Content_Length="-1"), b"x"), BROKE_OFF, id="negative length"),
    pytest.param(raw(CUT_CHUNKS, b"zz\r\n"), BROKE_OFF, id="broken chunk"),
    pytest.param(raw(CUT_CHUNKS), BROKE_OFF, id="torn between chunks"),
    pytest.param(
        endless(b"HTTP/1.1 200 OK\r\n", b"X-More: header\r\n", limit_bytes=64 * MIB),
        BROKE_OFF,
        id="headers without end",
    ),
    pytest.param(reply(gzip.compress(b"vllm:x 1\n"), Content_Encoding="gzip"), PACKED, id="gzip"),
    pytest.param(
        reply(zlib.compress(GZIP_BOMB), Content_Encoding="gzip, deflate"), PACKED, id="gzip bomb in a gzip bomb"
    ),
]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_useless_answer_is_told_in_one_line(answer: hostile.Answer, expected: tuple[str, int | None, str]) -> None:
    """For every useless answer the reason is one line that names what to check."""
    with Hostile(answer) as server:
        actual = read(server.url)
    kind, status, reason = expected
    assert (kind, status, containing(reason)) == actual


SLOW_ANSWERS = [
    pytest.param(silent(), id="accepts and says nothing"),
    pytest.param(silent(b"HTTP/1.1 200"), id="half a status line"),
    pytest.param(endless(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", pause_seconds=0.05), id="slow headers"),
    pytest.param(silent(head(Content_Length="100") + b"vllm:"), id="stops in the page"),
    pytest.param(endless(head(), b"#", pause_seconds=0.01), id="a page that never ends"),
    pytest.param(
        endless(head(Transfer_Encoding="chunked"), b"1\r\n#\r\n", pause_seconds=0.01), id="chunks that never end"
    ),
    pytest.param(
        endless(b"", b"HTTP/1.1 102 Processing\r\n\r\n", pause_seconds=0.01), id="interim answers that never end"
    ),
]


@pytest.mark.parametrize("answer", SLOW_ANSWERS)
def test_answer_that_does_not_end_is_given_up(answer: hostile.Answer) -> None:
    """A server that keeps sending a little, or nothing, is given up at the deadline for the whole answer."""
    with Hostile(answer) as server:
        actual = read(server.url, seconds=SHORT_SECONDS)
    assert ("failed", None, containing("500 ms on /metrics/")) == actual


@pytest.mark.parametrize(
    "first",
    [pytest.param(head(Content_Length=str(100 * MIB)), id="announced"), pytest.param(head(), id="not announced")],
)
def test_huge_page_is_left_unread(first: bytes) -> None:
    """Of a page of 100 MB no more is taken than the limit and what the sockets hold."""
    page = endless(first, b"# HELP x\n" * 8192, limit_bytes=100 * MIB)
    with Hostile(page) as server:
        actual = read(server.url)
        sent_bytes = server.sent_bytes
    assert ("refused", None, containing(f"{MAX_ANSWER_BYTES >> 20} MiB on /metrics/")) == actual
    assert sent_bytes < MAX_ANSWER_BYTES + 16 * MIB


def test_largest_page_is_read() -> None:
    """A page of exactly the limit is still a page."""
    text = "#" * MAX_ANSWER_BYTES
    with Hostile(reply(text)) as server:
        actual = read(server.url)
    assert Answer(text=text, content_type="text/plain", server=None) == actual


def test_server_that_is_not_there_is_told() -> None:
    """A closed port and an unknown host name are failures to connect."""
    with refused_port() as port:
        actual = read(f"http://127.0.0.1:{port}")
    assert ("failed", None, containing("cannot connect")) == actual == read("http://kvdiag.invalid:8000")


def test_untrusted_certificate_is_told(certificate: Certificate, tmp_path: Path) -> None:
    """A certificate of an unknown authority names the option that makes it known, one of a trusted name too."""
    other = ssl.create_default_context(cafile=make_certificate(tmp_path).certificate)
    with Hostile(reply("x 1\n"), tls=certificate.server_context) as server:
        actual = [read(server.url), read(server.url, verify=other)]
    assert [("failed", None, containing("--ca-file"))] * 2 == actual


def test_trusted_certificate_is_accepted(certificate: Certificate) -> None:
    """With its authority given, or unchecked, the same server is read."""
    trusting = ssl.create_default_context(cafile=certificate.certificate)
    with Hostile(reply("x 1\n"), tls=certificate.server_context) as server:
        actual = [read(server.url, verify=trusting), read(server.url, verify=False)]
    assert [Answer(text="x 1\n", content_type="text/plain", server=None)] * 2 == actual


def test_the_wrong_protocol_is_told(certificate: Certificate) -> None:
    """TLS spoken to a plain port, and plain HTTP to a TLS port, are errors and no crash."""
    with Hostile(reply("x 1\n")) as plain, Hostile(reply("x 1\n"), tls=certificate.server_context) as tls:
        actual = read(plain.url.replace("http", "https")), read(tls.url.replace("https", "http"))
    assert (("failed", None, containing("TLS failed")), BROKE_OFF) == actual


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("<html>", id="HTML"),
        pytest.param("", id="empty"),
        pytest.param("[" * 100_000, id="nested without end"),
        pytest.param('{"a": ' + "9" * 5000 + "}", id="a number without end"),
    ],
)
def test_what_is_not_json_is_told(text: str) -> None:
    """An answer that should be JSON and is not is one kind of error."""
    answer = Answer(text=text, content_type="application/json", server=None)
    with pytest.raises(Unreadable) as caught:
        HttpReader.decode(answer)
    assert containing("not JSON", CHECK) == str(caught.value)


def test_json_is_decoded() -> None:
    """A JSON answer comes as its value."""

    async def get(url: str) -> object:
        async with httpx2.AsyncClient(base_url=url, trust_env=False, verify=TRUST) as client:
            return await HttpReader(client, LONG_SECONDS).json("/version")

    with Hostile({"/version": reply_json({"version": "0.32.0"})}) as server:
        actual = asyncio.run(get(server.url))

    assert {"version": "0.32.0"} == actual


def test_packing_is_not_asked_for() -> None:
    """The request says that a packed answer is not wanted."""
    heads: list[bytes] = []

    def answer(peer: hostile.Peer) -> None:
        heads.append(peer.request_head)
        reply("x 1\n")(peer)

    with Hostile(answer) as server:
        read(server.url)

    (asked,) = heads
    assert b"accept-encoding: identity" in asked.lower().split(b"\r\n")


def test_what_is_asked_again_is_asked_alike_but_for_cookies() -> None:
    """A gateway that keeps clients at one replica by a cookie sees it again, though requests are built once."""
    heads: list[bytes] = []

    def answer(peer: hostile.Peer) -> None:
        heads.append(peer.request_head)
        (reply("x 1\n", Set_Cookie="replica=7") if len(heads) == 3 else reply("x 1\n"))(peer)

    async def work(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, trust_env=False, verify=TRUST) as client:
            reader = HttpReader(client)
            for number in range(5):
                await reader.get("/metrics/", params=[("name[]", "a" if number != 1 else "b")])

    with Hostile(answer) as server:
        asyncio.run(work(server.url))

    assert heads[0] == heads[2]
    assert heads[0] != heads[1]
    assert [False, False, False, True, True] == [b"Cookie: replica=7" in one for one in heads]


def test_no_cookie_is_kept() -> None:
    """A server could fill memory with them, and each request."""

    async def kept(url: str) -> int:
        async with open_client(url, ServerAccess()) as client:
            await client.get("/metrics")
            return len(client.cookies.jar)

    with Hostile({"/metrics": reply("", Set_Cookie="a=b")}) as server:
        assert 0 == asyncio.run(kept(server.url))
