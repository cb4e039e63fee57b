"""What `kvdiag fit` answers, and the one line with which it refuses."""

import json
from typing import Any

import pytest

from kvdiag.commands import main

GIB = 1 << 30
NO_GPU = {"--gpu", "--from-log", "--calibrate"}
"""Options with which no GPU is added: one is given, or the engine reports its own."""


def on_a_gpu(arguments: tuple[str, ...]) -> list[str]:
    """The command line, on an H100 unless it says otherwise."""
    return ["fit", *arguments, *(() if NO_GPU & set(arguments) else ("--gpu", "h100"))]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON that `kvdiag fit` prints."""
    code = main([*on_a_gpu(arguments), "--output", "json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr with which `kvdiag fit` refuses."""
    code = main(on_a_gpu(arguments))
    printed = capsys.readouterr()
    lines = printed.err.splitlines()

    assert (3, "", 1) == (code, printed.out, len(lines)), printed
    return lines[0]
