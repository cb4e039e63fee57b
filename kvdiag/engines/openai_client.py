"""Reads a server with OpenAI's API and a Prometheus endpoint over HTTP, for every engine that has both.

No response is trusted: `HttpReader` limits their size and time. The names and the meaning of the engine's metrics are
its `EngineAdapter`'s; an engine with another API has a client of its own.
"""

import asyncio
import contextlib
import time
from collections.abc import Generator, Sequence
from typing import Any

from kvdiag.engines.engine import SOURCE, EngineAdapter, EngineReading, Identity
from kvdiag.formatting import format_duration
from kvdiag.model import MAX_COUNT, Gap, Lengths
from kvdiag.sources.http import HttpReader, TooMuchError, Unreadable
from kvdiag.sources.prometheus_text import Page, PageParser, TooLargeError

WHOLE_EVERY = 10
"""Filtered responses without an engine before the next unfiltered request."""

MAX_PARSE_SECONDS = 0.5
"""CPU time to parse one response: 0.007 s for all metrics of vLLM 0.32 per engine, several times that when busy."""

MAX_TEXT_CHARACTERS = 4096
"""Of a model's name or folder: no path is longer."""


def completion_body(
    *, model: str, token_ids: Sequence[int], max_tokens: int, cache_salt: str | None, user: str | None
) -> dict[str, Any]:
    """The JSON body of one request, in vLLM's dialect of OpenAI's API.

    `ignore_eos` and `min_tokens` make the length exact; `continuous_usage_stats` puts an exact count into every chunk,
    even where several tokens come in one.
    """
    return {
        "model": model,
        "prompt": token_ids,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **({} if cache_salt is None else {"cache_salt": cache_salt}),
        **({} if user is None else {"user": user}),
    }


def shown_text(value: object) -> str | None:
    """A text that can be shown and sent in a request; `None` for anything else."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT_CHARACTERS:
        return None
    return None if any("\ud800" <= character <= "\udfff" for character in value) else value


async def cooperatively(steps: Generator[None, None, Page], *, max_seconds: float = MAX_PARSE_SECONDS) -> Page:
    """The result of a parser's steps; other tasks run between them.

    Raises:
        TooLargeError: they take more CPU time than any server's metrics.
    """
    spent_seconds = 0.0
    while True:
        begun_seconds = time.thread_time()
        try:
            next(steps)
        except StopIteration as end:
            page: Page = end.value
            return page
        spent_seconds += time.thread_time() - begun_seconds
        if spent_seconds > max_seconds:
            raise TooLargeError(f"parsing takes more than {format_duration(max_seconds)} of CPU time")
        await asyncio.sleep(0)


class OpenAIClient:
    """Reads one server with OpenAI's API (`kvdiag.engines.engine.EngineClient`)."""

    reads_metrics_alone = False
    """Whether `page` asks no other endpoint, so that it reads a Dynamo worker, too."""

    def __init__(self, http: HttpReader, engine: EngineAdapter) -> None:
        """Read through `http`, whose base address is the server's."""
        self._http = http
        self.engine = engine
        self._filtered = bool(engine.polled_metrics)
        self._empty = 0
        self._why_none: tuple[Gap, ...] = ()
        self._parsers: dict[tuple[str, ...], PageParser] = {}

    async def identify(self) -> Identity:
        """The server's version and model; Unreadable if it is no OpenAI-compatible server."""
        listed = await self._http.get("/v1/models")
        models = self._http.decode(listed)
        entries = models.get("data") if isinstance(models, dict) else None
        first = entries[0] if isinstance(entries, list) and entries else None
        if not isinstance(first, dict):
            raise Unreadable("absent", f"/v1/models lists no model: is this a {self.engine.title} server?")
        version = None
        with contextlib.suppress(Unreadable):  # /version is optional: the names of the metrics show the dialect as well
            found = await self._http.json("/version") if self.engine.reports_version else None
            version = found.get("version") if isinstance(found, dict) else None
        longest = first.get("max_model_len")
        return Identity(
            version=shown_text(version),
            model=shown_text(first.get("id")),
            root=shown_text(first.get("root")),
            max_model_len_tokens=longest if type(longest) is int and 0 < longest <= MAX_COUNT else None,
            server_header=listed.server,
        )

    async def page(self, names: tuple[str, ...] = ()) -> Page:
        """As `EngineClient.page`; TooMuchError if the response is too large."""
        # Servers without a filter return all metrics.
        path, params = self.engine.metrics_path, [("name[]", name) for name in names]
        answer = await self._http.get(path, params)
        if "html" in answer.content_type:
            raise Unreadable("refused", "it returned a web page instead of metrics: check the URL")
        try:
            return await cooperatively(self._parsers.setdefault(names, PageParser()).parsing(answer.text))
        except TooLargeError as error:
            reason = f"the response of the metrics endpoint is too large: {error}"
            self._http.rest(path, params, reason)
            raise TooMuchError("refused", reason) from error
        except ValueError as error:
            raise Unreadable("refused", f"the metrics are malformed: {str(error)[:120]}") from error

    async def read(self) -> EngineReading:
        """The engines now, or a gap with the reason why not."""
        try:
            engines, gaps = self.engine.parse_engines(
                await self.page(self.engine.polled_metrics if self._filtered else ())
            )
            if engines is None and self._filtered and gaps[0].kind == "absent":
                return await self._unfiltered()
        except Unreadable as error:
            return None, (Gap(source=SOURCE, kind=error.kind, reason=str(error)),)
        return engines, gaps

    async def lengths(self) -> Lengths | None:
        """How long finished requests were; Unreadable as `page`."""
        names = self.engine.length_metrics
        return self.engine.parse_lengths(await self.page(names)) if names else None

    async def clean_up(self) -> str | None:
        """Nothing: what is cached under kvdiag's salts is free for others at once."""
        return None

    async def _unfiltered(self) -> EngineReading:
        """The engines if a filtered response has none: the server cannot filter, or no engine has started."""
        if self._empty % WHOLE_EVERY == 0:
            engines, self._why_none = self.engine.parse_engines(await self.page())
            if engines is not None:
                again = self.engine.parse_engines(await self.page(self.engine.polled_metrics))
                self._filtered = again[0] is not None
                self._empty = 0
                return again if self._filtered else (engines, self._why_none)
        self._empty += 1
        return None, self._why_none
