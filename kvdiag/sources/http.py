"""Reads from untrusted HTTP servers: limited in size and time, no redirects, one-line errors.

In this order: an answer that exceeded a limit less than a minute ago is not requested again (reads then give the
reason); the whole answer has one time limit; a status is either absent (404) or failed; a compressed body is
refused, because it can unpack to any size; the body is read in chunks, limited in bytes and in number. Cookies are not
kept. Every failure is an `Unreadable` with its cause and the next step, so that a source can make a gap of it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2

from kvdiag.formatting import format_count, format_duration
from kvdiag.model import GapKind
from kvdiag.sources.bounded_json import TooManyValuesError, decode

MAX_ANSWER_BYTES = 4 * 2**20
"""The metrics of vLLM 0.32 have 59 KB; 4 MiB is room for 64 engines behind one front end."""

MIN_CHUNK_BYTES = 256
"""On average, after the first `FREE_CHUNKS`: reading a chunk costs as much as parsing metrics."""

FREE_CHUNKS = 1024

REST_SECONDS = 60.0
"""Pause before an answer that exceeded a limit is requested again."""

ANSWER_SECONDS = 5.0
"""Timeout of one whole response. A busy API server can take 1 s; after 5 s a sample is useless."""

MAX_KEPT = 64
"""Prepared requests that are kept for reuse."""

Json = dict[str, Any]

UNPACKED = {"Accept-Encoding": "identity"}
"""Request headers that ask for an answer as it is."""


KEY_STATUSES = (401, 403)
"""Of an answer that requires a key, or another one."""

NO_ANSWER = "no answer in time: is the server hanging, or a firewall in between?"


def no_cookies() -> CookieJar:
    """A jar that keeps nothing: a server could fill it without end, and would get it back with each request."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=()))


class Unreadable(Exception):  # noqa: N818 - it is not always an error: `absent` is a fact about the server
    """Why there is no answer, in one line, and whether it is `absent`, has `failed`, or came and was `refused`."""

    def __init__(self, kind: GapKind, reason: str, *, status: int | None = None) -> None:
        """Keep the reason, and the HTTP status where there was one."""
        super().__init__(reason)
        self.kind: GapKind = kind
        self.status = status


class TooMuchError(Unreadable):
    """A response that exceeds a limit, and would again if the request was repeated."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A bounded answer of a server."""

    text: str
    content_type: str
    server: str | None
    date: str | None = None
    """The Date header."""


class HttpReader:
    """Reads from one server, the client's base URL; the client's headers, which must not change, carry the key."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        seconds: float = ANSWER_SECONDS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read with `client`, at most `seconds` for a whole answer."""
        self._client = client
        self._seconds = seconds
        self._clock = clock
        self._rests: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[float, str]] = {}
        self._asked: dict[tuple[str, tuple[tuple[str, str], ...]], httpx2.Request] = {}

    @property
    def base_url(self) -> str:
        """The server's address."""
        return str(self._client.base_url)

    async def get(self, path: str, params: Sequence[tuple[str, str]] = (), *, body: Json | None = None) -> Answer:
        """One answer to a GET, or to a POST where there is a body.

        Raises:
            Unreadable: no connection, no certificate, no permission, too large, too slow, or an error status.
            TooMuchError: it is over a budget, or was within the last minute.
        """
        until_seconds, why = self._rests.get((path, tuple(params)), (0.0, ""))
        if self._clock() < until_seconds:
            raise TooMuchError("refused", f"{why}; the next attempt is {format_duration(REST_SECONDS)} after the last")
        try:
            async with asyncio.timeout(self._seconds):
                return await self._get(path, params, body)
        except TooMuchError as error:
            self.rest(path, params, str(error))
            raise
        except TimeoutError as error:
            late = f"no complete answer within {format_duration(self._seconds)} on {path}"
            raise Unreadable("failed", late) from error
        except httpx2.HTTPError as error:
            raise Unreadable("failed", explain(error)) from error
        except RuntimeError as error:
            if not self._client.is_closed:
                raise
            raise Unreadable("failed", "this connection was closed on our side") from error

    def rest(self, path: str, params: Sequence[tuple[str, str]], reason: str) -> None:
        """Do not request an answer again for a minute: it exceeded a limit, or took too long to parse."""
        if len(self._rests) >= MAX_KEPT:
            self._rests.clear()
        self._rests[(path, tuple(params))] = (self._clock() + REST_SECONDS, reason)

    async def _get(self, path: str, params: Sequence[tuple[str, str]], body: Json | None) -> Answer:
        async with aclosing(await self._client.send(self._request(path, params, body), stream=True)) as response:
            if response.status_code in KEY_STATUSES:
                why = "the server requires an API key: set KVDIAG_API_KEY, and name the server with --url"
                if "Authorization" in response.request.headers:
                    why = "the server rejected the API key"
                raise Unreadable("refused", f"{response.status_code} on {path}: {why}", status=response.status_code)
            if response.status_code != httpx2.codes.OK:
                # A proxy answers 502 to 504 for a server that is down.
                kind: GapKind = "failed" if response.is_server_error else "refused"
                if response.status_code == httpx2.codes.NOT_FOUND:
                    kind = "absent"
                reason = f"{response.status_code} on {path}: check the URL; is an LLM server there?"
                raise Unreadable(kind, reason, status=response.status_code)
            async with aclosing(unpacked(response, path)) as chunks:
                content = await gathered(chunks, MAX_ANSWER_BYTES, f"{path}: not a metrics endpoint")
            return Answer(
                text=content.decode("utf-8", errors="replace"),
                content_type=response.headers.get("content-type", "").lower(),
                server=response.headers.get("server"),
                date=response.headers.get("date"),
            )

    def _request(self, path: str, params: Sequence[tuple[str, str]], body: Json | None) -> httpx2.Request:
        """A request; repeated ones are built once, because building takes as long as sending."""
        if body is not None or self._client.cookies:
            method = "GET" if body is None else "POST"
            return self._client.build_request(method, path, params=list(params), json=body, headers=UNPACKED)
        key = (path, tuple(params))
        if key not in self._asked:
            if len(self._asked) >= MAX_KEPT:
                self._asked.clear()
            self._asked[key] = self._client.build_request("GET", path, params=list(params), headers=UNPACKED)
        return self._asked[key]

    async def json(self, path: str, *, body: Json | None = None) -> Any:
        """One answer as of `get`, decoded.

        Raises:
            Unreadable: as `get`, or it is not JSON.
        """
        return self.decode(await self.get(path, body=body))

    @staticmethod
    def decode(answer: Answer) -> Any:
        """The JSON value of an answer.

        Raises:
            Unreadable: it is not JSON.
        """
        try:
            return decode(answer.text)
        except TooManyValuesError as error:
            raise TooMuchError("refused", str(error)) from error
        except ValueError as error:
            raise Unreadable("failed", "the answer is not JSON: check the URL; is an LLM server there?") from error


def unpacked(response: httpx2.Response, path: str) -> AsyncGenerator[bytes]:
    """The body as received; the caller must close it unless it is read to the end.

    Raises:
        Unreadable: it is packed. A few bytes can unpack to any size, without a pause in which a timeout could act.
    """
    packing = response.headers.get("content-encoding", "identity")
    if packing.lower() != "identity":
        raise Unreadable(
            "refused", f"the answer on {path} is compressed ({packing[:40]}) although that was not requested"
        )
    return response.aiter_raw()


async def gathered(chunks: AsyncIterator[bytes], limit_bytes: int, where: str) -> bytearray:
    """A body of at most `limit_bytes`; other tasks run while it is read.

    Raises:
        TooMuchError: it is larger, or comes in more pieces than any server sends.
    """
    content = bytearray()
    count = 0
    async for chunk in chunks:
        content += chunk
        count += 1
        if len(content) > limit_bytes:
            raise TooMuchError("refused", f"more than {limit_bytes >> 20} MiB on {where}")
        if count > FREE_CHUNKS + len(content) // MIN_CHUNK_BYTES:
            raise TooMuchError("refused", f"{format_count(count)} chunks for {len(content):,} bytes on {where}")
        if count % FREE_CHUNKS == 0:
            await asyncio.sleep(0)
    return content


CERTIFICATE_REASONS = {
    "mismatch": "is for another host: give the address that it names",
    "has expired": "has expired: renew it",
}
"""What OpenSSL says of a certificate, and what to do."""


def explain(error: httpx2.HTTPError) -> str:
    """The cause of a connection error and what to check, in one line."""
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        known = (advice for reason, advice in CERTIFICATE_REASONS.items() if reason in text)
        return f"TLS: the server's certificate {next(known, 'is not trusted: pass its authority with --ca-file')}"
    if "SSL" in text or "TLS" in text:
        return f"TLS failed ({text[:80]}): is this an https server?"
    if isinstance(error, httpx2.ConnectError):
        return f"cannot connect ({text[:80]}): is the server up, and the URL right?"
    if isinstance(error, httpx2.TimeoutException):
        return NO_ANSWER
    return f"the connection was lost ({text[:80]})"
