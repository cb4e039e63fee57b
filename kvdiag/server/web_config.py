"""A web configuration file, in the form that Prometheus' exporters share: TLS, passwords, headers of answers.

The form: https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md. As there, passwords
guard every page, /-/healthy among them, files are looked for beside the configuration, and unknown keys are errors.
What Python's `ssl` cannot do is refused by name, never left out in silence.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
import secrets
import ssl
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from kvdiag.errors import KvdiagError
from kvdiag.server.connections import Access
from kvdiag.sources.worker_thread import ReadTimeout, ThreadedReader

MAX_FILE_BYTES = 2**20

KNOWN: Mapping[str, frozenset[str]] = {
    "tls_server_config": frozenset(
        {
            *("cert_file", "key_file", "client_auth_type", "client_ca_file", "client_ca", "min_version", "max_version"),
            "prefer_server_cipher_suites",
        }
    ),
    "http_server_config": frozenset({"http2", "headers"}),
}
REFUSED: Mapping[str, str] = {
    "cert": "put the certificate into a file, and give cert_file",
    "key": "put the key into a file, and give key_file",
    "client_allowed_sans": "let a proxy in front look at the names of clients",
    "cipher_suites": "its names are Go's; give min_version: TLS13, whose suites are all good",
    "curve_preferences": "leave it out",
    "rate_limit": "leave it out: requests are bounded in time and number as they are",
}
CLIENT_AUTH: Mapping[str, ssl.VerifyMode] = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
"""Go's other two take certificates without looking at them, which Python's `ssl` does not."""

VERSIONS: Mapping[str, ssl.TLSVersion] = {
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
HASH = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
HASH_CHARACTERS = 31
"""Of such a hash, after its cost and its salt."""

MOST_COST = 14
"""Of a bcrypt hash: a second of a core for every wrong password. 10 is usual."""

CHECK_SECONDS = 4.0
"""For a password that was not seen before, with the time until it is its turn."""

WRONG_SECONDS = 1.0
"""Delay after a wrong password before the next one of this user is checked for the same client."""

MOST_USERS = 100
MOST_GUESSERS = 1024
MOST_REMEMBERED = 100
MOST_PASSWORD_BYTES = 72
"""What bcrypt takes in of a password. Longer ones are refused by its library, and so by Go's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """What such a file asks for. `certificate` and `key` are files, `None` where there is no TLS."""

    certificate: Path | None = None
    key: Path | None = None
    client_auth: ssl.VerifyMode = ssl.CERT_NONE
    client_ca_file: Path | None = None
    client_ca: str | None = None
    least_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    most_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    server_prefers: bool = True
    headers: tuple[tuple[str, str], ...] = ()
    users: Mapping[str, str] = field(default_factory=dict)

    @property
    def transport(self) -> WebConfig:
        """What of it concerns TLS."""
        return replace(self, headers=(), users={})

    def tls(self) -> ssl.SSLContext | None:
        """What connections are wrapped in, `None` for none.

        Raises:
            KvdiagError: certificates or key cannot be used.

        """
        if self.certificate is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.minimum_version, context.maximum_version = self.least_version, self.most_version
            if not self.server_prefers:
                context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
            self.load(context)
            context.verify_mode = self.client_auth
            if self.client_auth is not ssl.CERT_NONE:
                context.load_verify_locations(cafile=self.client_ca_file, cadata=self.client_ca)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise KvdiagError(f"cannot use client_ca_file or client_ca: {_reason(error)}") from error
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Read certificate and key, for connections from now on.

        Raises:
            KvdiagError: they cannot be used.

        """
        if self.certificate is None or self.key is None:
            return
        for path in (self.certificate, self.key):
            try:
                path.open("rb").close()
            except OSError as error:
                raise KvdiagError(f"cannot read {path}: {(error.strerror or '').lower()}") from error
        try:
            # A key with a passphrase would have it asked for on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ssl.SSLError, ValueError) as error:
            raise KvdiagError(f"{self.certificate} and {self.key} are no pair for TLS: {_reason(error)}") from error


class Passwords:
    """The users and their bcrypt hashes; what was found out is remembered, so that a scrape costs no hashing."""

    def __init__(self, users: Mapping[str, str]) -> None:
        """Ask nobody yet.

        Raises:
            KvdiagError: there are users, and nothing to check their passwords with.

        """
        self._users = dict(users)
        self._bcrypt = needed("bcrypt", "basic_auth_users") if users else None
        self._secret = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        # For users that there are not: the time taken shall not tell that. Made up: to hash a password would hold up
        # sampling for as long as to look at one takes.
        costs = [int(found[1]) for each in users.values() if (found := HASH.fullmatch(each))]
        self._nobodys = (
            "" if self._bcrypt is None else self._bcrypt.gensalt(max(costs)).decode() + "." * HASH_CHARACTERS
        )
        self._hashing: ThreadedReader[bool] = ThreadedReader(self._right, "bcrypt")
        self._next_seconds: OrderedDict[tuple[str, str], float] = OrderedDict()
        """When the next password of a client and user is checked, if the last one was wrong."""
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()

    async def allow(self, authorization: str, address: str) -> bool | None:
        """Whether a header opens the door to a client at `address`; `None` where that takes too long now."""
        if self._bcrypt is None:
            return True
        given = _given(authorization)
        if given is None:
            return False
        user, password = given
        expected = self._users.get(user, self._nobodys)
        parts = b"".join(len(part).to_bytes(4) + part for part in (user.encode(), expected.encode(), password))
        key = hmac.digest(self._secret, parts, hashlib.sha256)
        if key not in self._known:
            try:
                right = await self._in_turn(
                    _origin(address), user if user in self._users else "", password=password, expected=expected
                )
            except (ReadTimeout, TimeoutError):
                return None
            self._known[key] = right and user in self._users
            if len(self._known) > MOST_REMEMBERED:
                # Guesses shall not drive out what is right.
                wrong = next((each for each, known in self._known.items() if not known), next(iter(self._known)))
                del self._known[wrong]
        return self._known[key]

    async def _in_turn(self, origin: str, user: str, *, password: bytes, expected: str) -> bool:
        """Check one password at a time: per user of a client address, per address, and overall.

        Locks are first come, first served: guesses queue behind each other in their own address's line, and every other
        client waits for at most one of them.

        Raises:
            ReadTimeout, TimeoutError: it takes too long.

        """
        key, loop = (origin, user), asyncio.get_running_loop()
        async with asyncio.timeout(CHECK_SECONDS), self._lock(*key):
            await asyncio.sleep(self._next_seconds.get(key, 0.0) - loop.time())
            async with self._lock(origin), self._lock():
                try:
                    right = await self._hashing.ask(CHECK_SECONDS, password=password, expected=expected)
                finally:
                    # Also if the client hung up: that must not make guessing faster.
                    self._next_seconds[key] = loop.time() + WRONG_SECONDS
                    if len(self._next_seconds) > MOST_GUESSERS:
                        self._next_seconds.popitem(last=False)
            if right:
                self._next_seconds.pop(key, None)
            return right

    def _lock(self, *key: str) -> asyncio.Lock:
        """Return the lock of this key; it exists as long as it is held or waited for."""
        return self._locks.setdefault(key, asyncio.Lock())

    def close(self) -> None:
        """Let the thread end."""
        self._hashing.close()

    def _right(self, *, password: bytes, expected: str) -> bool:
        # Go's and Apache's $2y$ is what others call $2b$.
        hashed = expected.replace("$2y$", "$2b$", 1).encode()
        return self._bcrypt is not None and bool(self._bcrypt.checkpw(password, hashed))


def _origin(address: str) -> str:
    """Return the address of a client; for IPv6 its /64 network, in which one host can use any address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return ""
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))  # noqa: PLR2004 - IPv4


def _given(authorization: str) -> tuple[str, bytes] | None:
    kind, _, text = authorization.partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(text.strip(), validate=True).partition(b":")
        name = user.decode()
    except (binascii.Error, ValueError):
        return None
    return (name, password) if colon and len(password) <= MOST_PASSWORD_BYTES and b"\0" not in password else None


def access(config: WebConfig) -> tuple[Access, Passwords]:
    """Who may read, and with what headers it is answered.

    Raises:
        KvdiagError: passwords cannot be checked here.

    """
    passwords = Passwords(config.users)
    return Access(allow=passwords.allow if config.users else None, headers=config.headers), passwords


def read_web_config(path: Path) -> WebConfig:
    """What a file asks for.

    Raises:
        KvdiagError: it cannot be read, or asks for what there is not.

    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    if len(text) > MAX_FILE_BYTES:
        raise KvdiagError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB: no web configuration")
    yaml = needed("yaml", "--web-config")
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise KvdiagError(f"{path} has YAML aliases: write out what they stand for")
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The library quotes the line, which may contain a password hash: name the place only.
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise KvdiagError(f"{path} is no YAML{place}") from error
    if not found:
        raise KvdiagError(f"{path} is empty: set basic_auth_users or tls_server_config, or leave out --web-config")
    return _parsed(found, path)


def lowered(before: WebConfig, now: WebConfig) -> str | None:
    """Return which protection a new configuration removes, `None` if none."""
    if before.users and not now.users:
        return "it removes all passwords (basic_auth_users)"
    if before.certificate is not None and now.certificate is None:
        return "it removes TLS (tls_server_config)"
    if now.client_auth < before.client_auth:
        return "it no longer requires client certificates (client_auth_type)"
    if now.least_version < before.least_version or now.most_version < before.most_version:
        return "it allows older TLS versions (min_version, max_version)"
    gone = [name for name, _ in before.headers if name not in dict(now.headers)]
    return f"it removes the headers {', '.join(gone)}" if gone else None


def needed(name: str, why: str) -> ModuleType:
    """A module that only some need.

    Raises:
        KvdiagError: it is not installed.

    """
    import importlib  # noqa: PLC0415 - with it, here alone

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise KvdiagError(f"{why} needs more than kvdiag brings: pip install 'kvdiag[web]'") from error


def _parsed(found: Any, path: Path) -> WebConfig:
    sections = _table(found, path, "it")
    for name in sections:
        if name in REFUSED:
            raise KvdiagError(f"{path}: {name} is not supported: {REFUSED[name]}")
        if name not in (*KNOWN, "basic_auth_users"):
            raise KvdiagError(f"{path}: unknown key {name!r}")
        if not sections[name]:
            raise KvdiagError(f"{path}: {name} is empty: fill it in or remove it")
    tls, http = (_section(sections, name, path) for name in KNOWN)
    if http.get("http2", False) is not False:
        raise KvdiagError(f"{path}: http2 is not supported: give http2: false")
    return WebConfig(
        **_tls(tls, path),
        headers=_headers(_table(http.get("headers"), path, "headers"), path),
        users=_users(_table(sections.get("basic_auth_users"), path, "basic_auth_users"), path),
    )


def _table(value: Any, path: Path, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise KvdiagError(f"{path}: {name} has to be a table of names and values")
    return value


def _section(sections: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = _table(sections.get(name), path, name)
    for key in section:
        if key in REFUSED:
            raise KvdiagError(f"{path}: {key} of {name} is not supported: {REFUSED[key]}")
        if key not in KNOWN[name]:
            raise KvdiagError(f"{path}: unknown key {key!r} of {name}")
    return section


def _tls(section: dict[str, Any], path: Path) -> dict[str, Any]:
    if not section:
        return {}
    for key, value in section.items():
        if key != "prefer_server_cipher_suites" and not (isinstance(value, str) and value):
            raise KvdiagError(f"{path}: {key} has to be a text")
    for key in ("cert_file", "key_file"):
        if key not in section:
            raise KvdiagError(f"{path}: tls_server_config has no {key}")
    auth = section.get("client_auth_type", "NoClientCert")
    if auth not in CLIENT_AUTH:
        raise KvdiagError(f"{path}: client_auth_type {auth!r} is not supported: give {' or '.join(CLIENT_AUTH)}")
    authority = "client_ca_file" in section or "client_ca" in section
    if authority != (CLIENT_AUTH[auth] is not ssl.CERT_NONE):
        raise KvdiagError(f"{path}: client_ca_file and a client_auth_type other than NoClientCert go together")
    for key in ("min_version", "max_version"):
        if section.get(key, "TLS12") not in VERSIONS:
            raise KvdiagError(f"{path}: {key} {section[key]!r} is not supported: give {' or '.join(VERSIONS)}")
    least, most = section.get("min_version", "TLS12"), section.get("max_version", "TLS13")
    if least > most:
        raise KvdiagError(f"{path}: min_version {least} is above max_version {most}")
    prefers = section.get("prefer_server_cipher_suites", True)
    if not isinstance(prefers, bool):
        raise KvdiagError(f"{path}: prefer_server_cipher_suites has to be true or false")
    beside = path.parent
    return {
        "certificate": beside / section["cert_file"],
        "key": beside / section["key_file"],
        "client_auth": CLIENT_AUTH[auth],
        "client_ca_file": beside / section["client_ca_file"] if "client_ca_file" in section else None,
        "client_ca": section.get("client_ca"),
        "least_version": VERSIONS[least],
        "most_version": VERSIONS[most],
        "server_prefers": prefers,
    }


def _headers(table: dict[str, Any], path: Path) -> tuple[tuple[str, str], ...]:
    for name, value in table.items():
        if name not in HEADERS:
            raise KvdiagError(f"{path}: the header {name!r} cannot be set")
        if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
            raise KvdiagError(f"{path}: the header {name} has to be a line of text")
        if HEADERS[name] and value not in HEADERS[name]:
            raise KvdiagError(f"{path}: the header {name} can be {' or '.join(HEADERS[name])}")
    return tuple(table.items())


def _users(table: dict[str, Any], path: Path) -> dict[str, str]:
    if len(table) > MOST_USERS:
        raise KvdiagError(f"{path}: {len(table)} users, {MOST_USERS} at most: use client certificates")
    for user, value in table.items():
        found = HASH.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            raise KvdiagError(f"{path}: no bcrypt hash for user {user!r}: make one with htpasswd -nBC 10 {user}")
        if not 4 <= int(found[1]) <= MOST_COST:  # noqa: PLR2004 - bcrypt's own least
            raise KvdiagError(f"{path}: the hash for user {user!r} has a cost of {int(found[1])}, {MOST_COST} at most")
    return dict(table)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error).lower()
