"""TGI's requests, which are text whose length is cut, its events, its server's description, and its log."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from kvdiag.engines.tgi import ENGINE, completion_body, error, generated, parallel_ranks
from kvdiag.errors import KvdiagError
from kvdiag.sources.http import HttpReader, Unreadable

LOG = """2024-11-20T10:00:00.000000Z  INFO text_generation_launcher: Args {
    max_total_tokens: Some(8192),
    num_shard: Some(2),
    cuda_memory_fraction: 0.9,
}
2024-11-20T10:00:01.000000Z  INFO text_generation_launcher: Default `max_batch_prefill_tokens` to 4096
2024-11-20T10:01:00.000000Z  INFO text_generation_launcher: KV-cache blocks: 123449, size: 1
2024-11-20T10:01:05.000000Z  INFO text_generation_router_v3: Setting max batch total tokens to 123449
"""
"""Figures of huggingface/text-generation-inference#2748 (2.4.0) in the launcher's wordings."""


def test_a_prompt_is_cut_to_its_tokens() -> None:
    """Each id is a word of the text, so that there are at least as many tokens as `truncate` leaves."""
    body = completion_body(model="m", token_ids=[300, 4000, 7], max_tokens=20, cache_salt="s", user=None)
    assert "300 4000 7" == body["inputs"]
    assert (3, 20) == (body["parameters"]["truncate"], body["parameters"]["max_new_tokens"])


@pytest.mark.parametrize(
    ("event", "before", "tokens"),
    [
        ({"index": 4, "token": {"id": 9}, "details": None}, 3, 4),
        ({"index": 5, "token": {"id": 9}, "details": {"generated_tokens": 5}}, 4, 5),
        ({"token": {"id": 9}, "details": {"generated_tokens": 10**9}}, 4, 5),
        ({"details": {"generated_tokens": True}}, 4, 4),
        ({"token": "x"}, 2, 2),
        ({}, 2, 2),
    ],
)
def test_events_count_tokens(event: dict[str, Any], before: int, tokens: int) -> None:
    """An event is one token; a number that does not follow from the events before is not believed."""
    assert tokens == generated(event, before)


def test_an_event_may_be_an_error() -> None:
    """The message of a failed generation, and of a refusal's body."""
    assert "Model is overloaded" == error({"error": "Model is overloaded", "error_type": "overloaded"})
    assert error({"token": {}}) is None


def identity_of(info: object) -> tuple[str | None, str | None, int | None]:
    """Version, model and longest request by an answer of GET /info."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        async def wire() -> AsyncIterator[bytes]:
            yield httpx2.Response(200, json=info).content

        return httpx2.Response(200 if request.url.path == "/info" else 404, content=wire())

    async def ask() -> tuple[str | None, str | None, int | None]:
        async with httpx2.AsyncClient(base_url="http://place", transport=httpx2.MockTransport(answer)) as client:
            found = await ENGINE.open(HttpReader(client)).identify()
            return found.version, found.model, found.max_model_len_tokens

    return asyncio.run(ask())


def test_the_server_describes_itself() -> None:
    """Version, model and the longest request stand in GET /info."""
    assert ("3.3.6", "m", 8192) == identity_of({"model_id": "m", "version": "3.3.6", "max_total_tokens": 8192})
    assert (None, "m", None) == identity_of({"model_id": "m", "version": 7, "max_total_tokens": "8192"})


@pytest.mark.parametrize("info", [[], {}, {"model_id": ["m"]}, None])
def test_a_description_without_a_model_is_none(info: object) -> None:
    """Another server's answer to GET /info is refused."""
    with pytest.raises(Unreadable):
        identity_of(info)


def test_the_log_has_the_pool() -> None:
    """Blocks of one token, the batch's most tokens, and the launcher's arguments."""
    report = ENGINE.parse_startup_log(LOG)
    assert (123_449, 123_449, 1) == (report.num_blocks, report.tokens, report.settings.block_size_tokens)
    settings = report.settings
    assert (8192, 4096, 2, 0.9) == (
        settings.max_model_len_tokens,
        settings.max_num_batched_tokens,
        settings.tensor_parallel,
        settings.memory_fraction_ratio,
    )
    with pytest.raises(KvdiagError):
        ENGINE.parse_startup_log("Args { max_total_tokens: Some(8192) }")


@pytest.mark.parametrize(
    ("commands", "ranks"),
    [(["text-generation-launcher --num-shard 4"], (4, 1)), (["text-generation-launcher"], None), ([], None)],
)
def test_shards_by_the_command_line(commands: list[str], ranks: tuple[int, int] | None) -> None:
    """Without the flag the launcher takes all devices that it sees."""
    assert ranks == parallel_ranks(commands)
