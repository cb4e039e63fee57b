"""kvdiag's own requests: unique random prompts of an exact length, streamed, so that their resident tokens are known.

Every request carries a cache salt of its own and random token ids (no prefix hits), has an exact length, and requests
its usage with every chunk. The engine adapter writes the request's body and reads the events of the response.

What the open requests hold is what the engine's gauges can show of it: all that they may need from admission on, where
an engine reserves it; and where gauges move only when a request ends, what they held when the last one did. Small
requests during the load and one after it then make the gauges move.
"""

import asyncio
import contextlib
import random
import secrets
import string
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.engines.engine import EngineAdapter, RequestDialect
from kvdiag.formatting import format_duration
from kvdiag.model import Capabilities, Load, Outcome, Workload
from kvdiag.model.capabilities import ALL
from kvdiag.sources.bounded_json import decode_object
from kvdiag.sources.http import UNPACKED, HttpReader, Unreadable, explain, unpacked

MAX_ERROR_CHARACTERS = 700
"""torch's out-of-memory message with all its figures has about 500 characters."""

CHUNKS_AT_ONCE = 256
MAX_EVENT_BYTES = 2**20
WORDS = 400
MAX_ID = 2**24
ANSWER_SECONDS = 10.0

REFRESH_SECONDS = 0.1
"""Between two of the small requests that make gauges move which only an ending request moves."""

REFRESH_PROMPT_TOKENS = DEFAULT_LIMITS.refresh_tokens - 1
"""Of each of them, which generates one token."""

SILENCE_SECONDS = 60.0
"""Longest wait for the next chunk: a 16K prefill on a slow server takes some seconds, a queue of ten half a minute."""

DEFAULT_TOKEN_IDS = tuple(range(300, 900))
"""Ids that are plain text in the vocabularies of Llama, Qwen, GPT and Gemma; used where /tokenize is not to be had."""


TIMED_OUT = "timed out"
"""How the error of a load begins that took too long."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request under way, or over: its tokens, how long they took, and why it failed."""

    prompt_tokens: int
    max_tokens: int
    generated_tokens: int = 0
    error: str | None = None
    first_token_seconds: float | None = None
    decode_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt, the salt that keeps it from prefix-cache hits, and the tenant that sends it: `user` and its headers."""

    token_ids: list[int]
    cache_salt: str | None
    user: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast one request alone is: seconds to its first token, tokens per second after it, and before it."""

    first_token_seconds: float
    tokens_per_second: float
    prompt_tokens_per_second: float = 1e6


class Requests:
    """Offers workloads to an OpenAI-compatible server and knows at any moment what they hold there."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        model: str,
        token_ids: Sequence[int] = DEFAULT_TOKEN_IDS,
        *,
        engine: EngineAdapter,
        capabilities: Capabilities = ALL,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """Send to `model` through `client` in the dialect of `engine`; prompts are drawn from `token_ids`."""
        self.engine = engine
        self._capabilities = capabilities
        self._shown: dict[_Request, int] = {}
        self._client = client
        self._silence_seconds = silence_seconds
        self._model = model
        self._token_ids = token_ids
        self._random = random.Random(secrets.randbits(64))  # noqa: S311 - unpredictable enough to miss every prefix
        self._open: set[_Request] = set()
        self._repeated: list[Prompt] = []

    def load(self) -> Load:
        """What the open requests hold now, as far as the engine's gauges can show it."""
        held = self._held()
        if not self._capabilities.on_completion:
            return Load(requests=len(self._open), resident_tokens=tuple(held.values()))
        shown = tuple(self._shown[request] for request in held if request in self._shown)
        return Load(requests=len(self._open), resident_tokens=shown, refreshed=True)

    def _held(self) -> dict[_Request, int]:
        reserved = self._capabilities.reserved
        return {
            one: one.prompt_tokens + (one.max_tokens if reserved else one.generated_tokens) - 1
            for one in self._open
            if one.generated_tokens
        }

    async def measure(self, prompt_tokens: int, max_tokens: int) -> Speed | str:
        """Send one request to warm the server up and see how fast it is; the error's text where it failed."""
        done = await self._send(self.new_prompt(prompt_tokens), max_tokens)
        if self._capabilities.on_completion:
            await self._refresh()
        if done.error is not None or done.first_token_seconds is None or done.decode_seconds is None:
            return done.error or "the server answered without a token"
        rate = (done.generated_tokens - 1) / done.decode_seconds if done.decode_seconds > 0 else 1000.0
        return Speed(
            first_token_seconds=done.first_token_seconds,
            tokens_per_second=max(rate, 0.1),
            prompt_tokens_per_second=prompt_tokens / max(done.first_token_seconds, 1e-3),
        )

    async def offer(self, workload: Workload) -> Outcome:
        """Send a workload's requests at once and wait for all of them; on cancellation all are given up."""
        prompts = self._prompts(workload)
        refreshes = small_tokens = 0
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._send(prompt, workload.max_tokens)) for prompt in prompts]
            while self._capabilities.on_completion:
                small_tokens += await self._refresh()
                refreshes += 1
                if not (await asyncio.wait(tasks, timeout=REFRESH_SECONDS))[1]:
                    small_tokens += await self._refresh()
                    refreshes += 1
                    break
        outcome = _outcome(*(task.result() for task in tasks))
        return replace(outcome, prompt_tokens=outcome.prompt_tokens + small_tokens, refreshes=refreshes)

    async def refresh(self, requests: int, seconds: float) -> int:
        """Send so many small requests at once, at whose end the gauges move, and give up those that take longer.

        Returns the prompt tokens of those that were answered: more would hide as many of other clients.
        """
        answered: list[int] = []

        async def send() -> None:
            answered.append(await self._refresh())

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for _ in range(requests):
                    group.create_task(send())
        return sum(answered)

    async def _refresh(self) -> int:
        """Send a small request, at whose end the gauges move; its prompt tokens, 0 where it has no answer."""
        request = _Request(prompt_tokens=REFRESH_PROMPT_TOKENS, max_tokens=1)
        with contextlib.suppress(httpx2.HTTPError, Unreadable):
            await self._stream(request, 1, self.new_prompt(REFRESH_PROMPT_TOKENS))
        self._shown = self._held()
        return REFRESH_PROMPT_TOKENS if request.generated_tokens else 0

    async def ask(self, prompt: Prompt, max_tokens: int) -> Outcome:
        """Send one prompt as it is, and see how long its first token takes."""
        done = await self._send(prompt, max_tokens)
        outcome = _outcome(done)
        return outcome if outcome.failed else replace(outcome, first_token_seconds=done.first_token_seconds)

    def _prompts(self, workload: Workload) -> list[Prompt]:
        """A prompt for each request: those of the last repeated workload where this one is repeated, too."""
        before = self._repeated if workload.repeated else []
        prompts = [one for one in before if len(one.token_ids) == workload.prompt_tokens]
        prompts += [self.new_prompt(workload.prompt_tokens) for _ in range(workload.requests - len(prompts))]
        if workload.repeated:
            self._repeated = prompts
        return prompts[: workload.requests]

    def new_prompt(self, tokens: int) -> Prompt:
        """A prompt that was never sent before, with a salt of its own."""
        return Prompt(token_ids=self._random.choices(self._token_ids, k=tokens), cache_salt=secrets.token_hex(16))

    async def _send(self, prompt: Prompt, max_tokens: int) -> _Request:
        request = _Request(prompt_tokens=len(prompt.token_ids), max_tokens=max_tokens)
        self._open.add(request)
        try:
            await self._stream(request, max_tokens, prompt)
        except (httpx2.HTTPError, Unreadable) as error:
            request.error = str(error) if isinstance(error, Unreadable) else explain(error)
        finally:
            self._open.discard(request)
        return request

    async def _stream(self, request: _Request, max_tokens: int, prompt: Prompt) -> None:
        dialect = self.engine.request
        body = dialect.body(
            model=self._model,
            token_ids=prompt.token_ids,
            max_tokens=max_tokens,
            cache_salt=prompt.cache_salt,
            user=prompt.user,
        )
        path = dialect.path
        clock = asyncio.get_running_loop().time
        sent = clock()
        async with self._client.stream(
            "POST",
            path,
            json=body,
            headers={**UNPACKED, **dialect.headers, **prompt.headers},
            timeout=self._silence_seconds,
        ) as response:
            if response.status_code != httpx2.codes.OK:
                request.error = await _error_of(response, dialect)
                return
            async with aclosing(_events(response, path)) as events:
                async for event in events:
                    request.error = _message(event, dialect)
                    if request.error is not None:
                        return
                    request.generated_tokens = dialect.generated(event, request.generated_tokens)
                    if request.generated_tokens:
                        taken_seconds = clock() - sent
                        if request.first_token_seconds is None:
                            request.first_token_seconds = taken_seconds
                        request.decode_seconds = taken_seconds - request.first_token_seconds
                    if request.generated_tokens >= max_tokens:
                        # The engine frees its blocks with the last token, before the rest is read.
                        self._open.discard(request)
                        if not self._capabilities.on_completion:
                            break  # there the gauges move when the response was read to its end
                    # A stream that has always more to read would never let the sampler have a turn.
                    await asyncio.sleep(0)
        if not request.generated_tokens:
            request.error = "the stream ended without a token"


def _outcome(*done: _Request) -> Outcome:
    errors = [one.error for one in done if one.error is not None]
    return Outcome(
        completed=len(done) - len(errors),
        failed=len(errors),
        prompt_tokens=sum(one.prompt_tokens for one in done if one.error is None),
        generated_tokens=sum(one.generated_tokens for one in done),
        errors=tuple(dict.fromkeys(errors))[:4],
    )


async def within(seconds: float, work: Awaitable[Outcome], requests: int) -> Outcome:
    """The outcome of this many requests; all of them count as failed if they take longer."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        error = f"{TIMED_OUT} after {format_duration(seconds)}"
        return Outcome(completed=0, failed=requests, prompt_tokens=0, generated_tokens=0, errors=(error,))


async def _events(response: httpx2.Response, path: str) -> AsyncGenerator[dict[str, Any]]:
    rest = bytearray()
    count = 0
    async with aclosing(unpacked(response, path)) as chunks:
        async for chunk in chunks:
            rest += chunk
            count += 1
            if count % CHUNKS_AT_ONCE == 0:
                # Many small chunks can be there already: the sampler has its turn between them.
                await asyncio.sleep(0)
            # Only the new chunk can end a line; searching all of it each time would be quadratic.
            *lines, rest = rest.split(b"\n") if b"\n" in chunk else (rest,)
            if max(map(len, (*lines, rest))) > MAX_EVENT_BYTES:
                reason = f"a line of more than {MAX_EVENT_BYTES >> 20} MiB: not a stream of completions"
                raise Unreadable("failed", reason)
            for line in lines:
                if (event := _event(bytes(line))) is not None:
                    yield event


def _event(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a server-sent event's data line; `None` for everything else."""
    if not line.startswith(b"data:"):
        return None
    try:
        return decode_object(line.removeprefix(b"data:"))
    except ValueError:
        return None  # [DONE], or a line that is none of ours


def _message(event: dict[str, Any], dialect: RequestDialect) -> str | None:
    text = dialect.error(event)
    return None if text is None else text[:MAX_ERROR_CHARACTERS]


async def _error_of(response: httpx2.Response, dialect: RequestDialect) -> str:
    content = b""
    async with aclosing(unpacked(response, dialect.path)) as parts:
        async for part in parts:
            content += part
            if len(content) > 4 * MAX_ERROR_CHARACTERS:
                break
    text = content.decode("utf-8", errors="replace")
    try:
        message = _message(decode_object(text), dialect)
    except ValueError:
        message = None
    return f"HTTP {response.status_code}: {message or text[:MAX_ERROR_CHARACTERS] or 'no text'}"


async def token_ids(
    client: httpx2.AsyncClient, model: str, *, answer_seconds: float = ANSWER_SECONDS
) -> tuple[int, ...]:
    """Distinct ids of random words as the server's own /tokenize gives them; a safe range where it does not answer.

    Special tokens are left out by asking for none and by taking only what words turn into.
    """
    draw = random.Random(7)  # noqa: S311 - any words will do
    text = " ".join("".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(WORDS))
    # vLLM's and SGLang's names, then llama.cpp's.
    body = {"model": model, "prompt": text, "add_special_tokens": False, "content": text, "add_special": False}
    try:
        answer = await HttpReader(client, answer_seconds).json("/tokenize", body=body)
    except Unreadable:
        return DEFAULT_TOKEN_IDS
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    listed = tokens if isinstance(tokens, list) else []
    known = {token for token in listed if isinstance(token, int) and 0 < token < MAX_ID}
    return tuple(sorted(known)) or DEFAULT_TOKEN_IDS
