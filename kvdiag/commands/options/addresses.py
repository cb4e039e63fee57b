"""Addresses and credentials as people give them: pasted with the path of a page, with a password inside, in files."""

import base64
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import click
import httpx2

from kvdiag.errors import KvdiagError

MAX_SECRET_BYTES = 64 * 2**10


def pasted(url: str, suffixes: Sequence[str], refusal: str) -> SplitResult:
    """The parts of a server's base address; the longest of `suffixes` that its path ends with is cut off.

    Raises:
        KvdiagError: it is no http or https address; `refusal` is the message.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        httpx2.URL(urlunsplit(parts))
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        # A password that a mistyped address has in its path would be shown.
        valid = valid and "@" not in parts.path
    except (ValueError, httpx2.InvalidURL) as error:
        raise KvdiagError(refusal) from error
    if not valid:
        raise KvdiagError(refusal)
    path = parts.path.rstrip("/")
    for suffix in sorted(suffixes, key=len, reverse=True):
        path = path.removesuffix(suffix)
    return parts._replace(path=path, query="", fragment="")


def without_user(parts: SplitResult) -> SplitResult:
    """The same address without a user name and password."""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2])


def basic_authorization(parts: SplitResult, user: str | None, password: str | None, file: Path | None) -> str | None:
    """The header of basic authentication by options, or else by the address itself; `None` if neither names a user.

    Raises:
        KvdiagError: the password cannot be read or used.
        click.UsageError: there is a password and no user.
    """
    name = user or unquote(parts.username or "")
    secret = read_secret(password, file) or unquote(parts.password or "")
    if secret and not name:
        raise click.UsageError("a password needs --user")
    return f"Basic {base64.b64encode(f'{name}:{secret}'.encode()).decode()}" if name else None


def read_secret(value: str | None, file: Path | None) -> str | None:
    """Return the secret given directly or in a file; `None` if there is none.

    Raises:
        KvdiagError: the file cannot be read, or its content is invalid.
    """
    if file is not None:
        try:
            with file.open("rb") as opened:
                content = opened.read(MAX_SECRET_BYTES)
            value = content.decode()
        except OSError as error:
            raise KvdiagError(f"cannot read {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise KvdiagError(f"{file} is not a text file") from error
    # A secret from a file often ends with a newline.
    value = (value or "").strip()
    if not (value.isascii() and value.isprintable()):
        raise KvdiagError("the token or password has characters that are invalid in HTTP: check it")
    return value or None
