"""What `kvdiag fit` answers, and the one line with which it refuses."""

import json
from typing import Any

import pytest

from kvdiag.commands import main

GIB = 1 << 30


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON that `kvdiag fit` prints."""
    code = main(["fit", *arguments, "--output", "json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr with which `kvdiag fit` refuses."""
    code = main(["fit", *arguments])
    printed = capsys.readouterr()
    lines = printed.err.splitlines()

    assert (3, "", 1) == (code, printed.out, len(lines)), printed
    return lines[0]
