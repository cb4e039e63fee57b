"""The one line that the command line says of bad input, and what an idle vLLM answers where it is asked at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.fixtures.hostile import Answer, reply, reply_json
from tests.integration.vllm.cli import kvdiag

SCRAPES = Path(__file__).parents[2] / "fixtures" / "scrapes"
PAGE = (SCRAPES / "vllm-0.32.0-cpu-tp2-idle.prom").read_text()
MODEL = {"id": "tiny", "root": "/models/tiny", "max_model_len": 20000}

SERVER: Mapping[str, Answer] = {
    "/v1/models": reply_json({"data": [MODEL]}),
    "/version": reply_json({"version": "0.32.0"}),
    "/metrics/": reply(PAGE),
}
"""What an idle vLLM answers."""


def refusal(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    """The one line that is said of bad input; whatever else went out or came back fails the test."""
    result = kvdiag(*arguments, env=env)
    assert (3, "", 1) == (result.code, result.stdout, result.stderr.count("\n")), result.stderr
    assert result.stderr.startswith("kvdiag: ")
    assert result.stderr.endswith("\n")
    return result.stderr.removeprefix("kvdiag: ").removesuffix("\n")


def without_details(text: str) -> str:
    """The text without what differs between versions of Python and OpenSSL."""
    return re.sub(r" \(.*?\)+:", " (…):", text)
