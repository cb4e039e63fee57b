"""Addresses as people paste them: with or without a scheme, and with the path of some page at their end."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit, urlunsplit

import httpx2

from kvdiag.errors import KvdiagError


def pasted(url: str, suffixes: Sequence[str], refusal: str) -> SplitResult:
    """The parts of a server's base address; the longest of `suffixes` that its path ends with is cut off.

    Raises:
        KvdiagError: it is no http or https address; `refusal` is what it says.

    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        httpx2.URL(urlunsplit(parts))
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except (ValueError, httpx2.InvalidURL) as error:
        raise KvdiagError(refusal) from error
    if not valid:
        raise KvdiagError(refusal)
    path = parts.path.rstrip("/")
    for suffix in sorted(suffixes, key=len, reverse=True):
        path = path.removesuffix(suffix)
    return parts._replace(path=path, query="", fragment="")
