"""Answers of the daemons to HTTP requests."""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

NOT_KEPT = ("Cache-Control", "no-store")
"""What is valid for one client at one moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An HTTP response to a GET; to a HEAD it is sent without its body."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


def json_answer(value: Any, *headers: tuple[str, str], status: HTTPStatus = HTTPStatus.OK) -> Answer:
    """A document as JSON."""
    body = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    return Answer(body=body, status=status, content_type="application/json", headers=headers)


def problem(status: HTTPStatus, text: str, *headers: tuple[str, str]) -> Answer:
    """An error response, as JSON."""
    body = json.dumps({"error": text}).encode() + b"\n"
    return Answer(status=status, body=body, content_type="application/json", headers=headers)
