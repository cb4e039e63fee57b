"""What tests of every kind share."""

from __future__ import annotations

import os

import pytest


def require(ok: bool, what: str) -> None:
    """Skip the test with one line where this machine lacks `what`; fail under CI=true, where nothing may be lacking."""
    if ok:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is missing, and nothing may be skipped under CI", pytrace=False)
    pytest.skip(f"{what} is missing here")
