"""Checks the passwords of clients against bcrypt hashes.

A check costs up to a second of CPU, so three things limit it. Results are remembered: a scrape costs no hashing. One
password is checked at a time, in a separate thread. Clients queue by address: one that guesses delays only itself.
An unknown user takes as long as a wrong password.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import importlib
import ipaddress
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import ModuleType
from weakref import WeakValueDictionary

from kvdiag.errors import KvdiagError
from kvdiag.sources.worker_thread import ReadTimeout, ThreadedReader

HASH = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
HASH_CHARACTERS = 31
"""Length of the digest, which follows cost and salt."""

CHECK_SECONDS = 4.0
"""Time limit for a password that is not remembered, waiting included."""

WRONG_SECONDS = 1.0
"""Delay after a wrong password before the next one of this user is checked for the same client."""

MAX_GUESSERS = 1024
MAX_REMEMBERED = 100
MAX_WAITING = 8
"""Passwords of a user of one address that are checked or wait: many guesses at once would hold all connections."""
MAX_PASSWORD_BYTES = 72
"""bcrypt reads no more of a password; its library refuses longer ones, as Go's does."""


class Passwords:
    """Users with their bcrypt hashes, and the results of recent checks."""

    def __init__(self, users: Mapping[str, str]) -> None:
        """Take the hash of each user; no password is checked yet.

        Raises:
            KvdiagError: there are users, and bcrypt is not installed.
        """
        self._users = dict(users)
        self._bcrypt = needed("bcrypt", "basic_auth_users") if users else None
        self._secret = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        # For unknown users, so that the response time does not reveal that they are unknown. The digest is invented:
        # computing one here would block sampling for as long as a check takes.
        costs = [int(found[1]) for each in users.values() if (found := HASH.fullmatch(each))]
        self._unknown_user_hash = (
            "" if self._bcrypt is None else self._bcrypt.gensalt(max(costs)).decode() + "." * HASH_CHARACTERS
        )
        self._hashing: ThreadedReader[bool] = ThreadedReader(self._right, "bcrypt")
        self._next_seconds: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Earliest time of the next check by client and user, after a wrong password."""
        self._waiting: Counter[tuple[str, str]] = Counter()
        """Checks that are in progress or wait for their turn, by client and user."""
        self._locks: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()

    async def allow(self, authorization: str, address: str) -> bool | None:
        """Whether an Authorization header grants access to a client at `address`; `None` if the check timed out."""
        if self._bcrypt is None:
            return True
        given = _given(authorization)
        if given is None:
            return False
        user, password = given
        expected = self._users.get(user, self._unknown_user_hash)
        parts = b"".join(len(part).to_bytes(4) + part for part in (user.encode(), expected.encode(), password))
        key = hmac.digest(self._secret, parts, hashlib.sha256)
        if key not in self._known:
            try:
                right = await self._in_turn(
                    _origin(address), user if user in self._users else "", password=password, expected=expected
                )
            except (ReadTimeout, TimeoutError):
                return None
            known = self._known[key] = right and user in self._users
            if len(self._known) > MAX_REMEMBERED:
                # Wrong guesses must not evict a right password.
                wrong = next((each for each, known in self._known.items() if not known), next(iter(self._known)))
                del self._known[wrong]
            return known
        return self._known[key]

    async def _in_turn(self, origin: str, user: str, *, password: bytes, expected: str) -> bool:
        """Check one password at a time: per user of a client address, per address, and overall.

        Locks are first come, first served: guesses queue behind each other in their own address's line, and every other
        client waits for at most one of them.
        """
        key, loop = (origin, user), asyncio.get_running_loop()
        if self._waiting[key] >= MAX_WAITING:
            raise TimeoutError
        async with asyncio.timeout(CHECK_SECONDS), self._waits(key), self._lock(*key):
            await asyncio.sleep(self._next_seconds.get(key, 0.0) - loop.time())
            async with self._lock(origin), self._lock():
                try:
                    right = await self._hashing.ask(CHECK_SECONDS, password=password, expected=expected)
                finally:
                    # Also if the client disconnected, so that disconnecting does not make guessing faster.
                    self._next_seconds[key] = loop.time() + WRONG_SECONDS
                    if len(self._next_seconds) > MAX_GUESSERS:
                        self._next_seconds.popitem(last=False)
            if right:
                self._next_seconds.pop(key, None)
            return right

    @asynccontextmanager
    async def _waits(self, key: tuple[str, str]) -> AsyncIterator[None]:
        self._waiting[key] += 1
        try:
            yield
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    def _lock(self, *key: str) -> asyncio.Lock:
        """Return the lock of this key; it exists as long as it is held or waited for."""
        return self._locks.setdefault(key, asyncio.Lock())

    def close(self) -> None:
        """Stop the hashing thread."""
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
    return (name, password) if colon and len(password) <= MAX_PASSWORD_BYTES and b"\0" not in password else None


def needed(name: str, why: str) -> ModuleType:
    """Import a module of the `web` extra; `why` names the option that needs it.

    Raises:
        KvdiagError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise KvdiagError(f"{why} needs an optional dependency: pip install 'kvdiag[web]'") from error
