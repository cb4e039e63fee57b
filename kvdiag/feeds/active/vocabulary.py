"""Token ids that a model's tokenizer knows as plain text, for prompts of an exact length."""

from __future__ import annotations

import random
import string

import httpx2

from kvdiag.feeds.active.load_generator import DEFAULT_TOKEN_IDS
from kvdiag.sources.http import HttpReader, Unreadable

WORDS = 400
MAX_ID = 2**24
ANSWER_SECONDS = 10.0


async def token_ids(
    client: httpx2.AsyncClient, model: str, *, answer_seconds: float = ANSWER_SECONDS
) -> tuple[int, ...]:
    """Distinct ids of random words as the server's own /tokenize gives them; a safe range where it does not answer.

    Special tokens are left out by asking for none and by taking only what words turn into.
    """
    draw = random.Random(7)  # noqa: S311 - any words will do
    text = " ".join("".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(WORDS))
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        answer = await HttpReader(client, answer_seconds).json("/tokenize", body=body)
    except Unreadable:
        return DEFAULT_TOKEN_IDS
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list):
        return DEFAULT_TOKEN_IDS
    known = {token for token in tokens if isinstance(token, int) and 0 < token < MAX_ID}
    return tuple(sorted(known)) or DEFAULT_TOKEN_IDS
