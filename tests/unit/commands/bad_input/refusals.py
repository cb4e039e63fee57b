"""The command line called within the test's own process, its one line about bad input, and an idle vLLM's answers."""

import io
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from kvdiag.commands import main
from kvdiag.commands.interruption import SIGNALS
from tests.fixtures.hostile import Answer, reply, reply_json
from tests.integration.vllm.cli import Result

SCRAPES = Path(__file__).parents[3] / "fixtures" / "scrapes"
PAGE = (SCRAPES / "vllm-0.32.0-cpu-tp2-idle.prom").read_text(encoding="utf-8")
MODEL = {"id": "tiny", "root": "/models/tiny", "max_model_len": 20000}

SERVER: Mapping[str, Answer] = {
    "/v1/models": reply_json({"data": [MODEL]}),
    "/version": reply_json({"version": "0.32.0"}),
    "/metrics/": reply(PAGE),
}
"""What an idle vLLM answers."""


@contextmanager
def _surroundings(env: Mapping[str, str]) -> Iterator[None]:
    """These variables, and the signal handlers that a run replaces."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def call(*arguments: str, env: Mapping[str, str] | None = None) -> Result:
    """Call the command line in this process, which saves the start of another."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with _surroundings(env or {}), redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    for stream in (out, err):
        stream.seek(0)
    return Result(code=code, stdout=out.read(), stderr=err.read())


def refusal(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    """The one line on stderr that refuses bad input; any other output or exit code fails the test."""
    result = call(*arguments, env=env)
    assert (3, "", 1) == (result.code, result.stdout, result.stderr.count("\n")), result.stderr
    assert result.stderr.startswith("kvdiag: "), result.stderr
    assert result.stderr.endswith("\n")
    return result.stderr.removeprefix("kvdiag: ").removesuffix("\n")


def without_details(text: str) -> str:
    """The text without what differs between versions of Python and OpenSSL."""
    return re.sub(r" \(.*?\)+(?=[:,;]|$)", " (…)", text)


def listed(messages: Mapping[str, str]) -> str:
    """Messages under the names of their cases, as a golden file keeps them."""
    return "".join(f"{name}\n    {message}\n" for name, message in messages.items())
