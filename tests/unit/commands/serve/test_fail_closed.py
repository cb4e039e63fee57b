"""Protection is not lost by mistake: empty files, reloads that take it away, guesses that lock others out."""

import asyncio
import base64
import contextlib
import gc
import ssl
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import bcrypt
import pytest

from kvdiag.commands import main
from kvdiag.errors import KvdiagError
from kvdiag.server.passwords import MAX_REMEMBERED, MAX_WAITING, Passwords
from kvdiag.server.web_config import WebConfig, lowered, read_web_config
from tests.unit.commands.serve.test_serve_settings import LONG_SECONDS, Told, configured
from tests.unit.commands.serve.test_web_config import HASH, basic

SLOW_HASH = "$2b$11$GUEbj4aDnJNOg6CiowCG9e1vU7zI2mHBvpl4dyVe9IJ/G5M2k1epK"
"""No user's password; an eighth of a second to check, so that all guesses take longer than a user may wait."""

RIGHT = "secret"
USERS = f"basic_auth_users: {{alice: {HASH}}}\n"
FRAMES = "http_server_config: {headers: {X-Frame-Options: deny}}\n"

EMPTY = {
    "no bytes": "",
    "white space": "\n \n",
    "a comment": "# basic_auth_users\n",
    "nothing": "{}",
    "null": "null",
    "false": "false",
    "no users": "basic_auth_users:\n",
    "an empty table of users": "basic_auth_users: {}\n",
    "no TLS": f"tls_server_config:\n{USERS}",
    "no headers": f"http_server_config: {{}}\n{USERS}",
}


@pytest.mark.parametrize("text", EMPTY.values(), ids=EMPTY)
def test_an_empty_file_is_refused_at_the_start(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Who gives a web configuration wants protection: one that asks for none is a mistake."""
    path = tmp_path / "web.yml"
    path.write_text(text)
    assert 3 == main(["serve", "--listen", "127.0.0.1:0", "--web-config", str(path)])
    assert f"{path}" in capsys.readouterr().err


def test_an_error_does_not_repeat_what_stands_in_the_file(tmp_path: Path) -> None:
    """A line that is no YAML may hold a password or its hash, and the error goes into a log."""
    path = tmp_path / "web.yml"
    path.write_text("basic_auth_users:\n  alice: hunter2: hunter3\n")
    with pytest.raises(KvdiagError) as refusal:
        read_web_config(path)
    assert "hunter" not in str(refusal.value)
    assert "line 2" in str(refusal.value)


SAFE = WebConfig(
    certificate=Path("c"),
    key=Path("k"),
    client_auth=ssl.CERT_REQUIRED,
    least_version=ssl.TLSVersion.TLSv1_3,
    headers=(("X-Frame-Options", "deny"), ("Strict-Transport-Security", "max-age=99")),
    users={"alice": HASH, "carol": HASH.replace("$04$", "$05$")},
)


@pytest.mark.parametrize(
    ("now", "is_lower"),
    [
        (replace(SAFE, users={}), True),
        (replace(SAFE, certificate=None, key=None), True),
        (replace(SAFE, client_auth=ssl.CERT_NONE), True),
        (replace(SAFE, client_auth=ssl.CERT_OPTIONAL), True),
        (replace(SAFE, least_version=ssl.TLSVersion.TLSv1_2), True),
        (replace(SAFE, headers=()), True),
        (replace(SAFE, headers=(("X-Frame-Options", "sameorigin"), ("Strict-Transport-Security", "max-age=99"))), True),
        (replace(SAFE, headers=(("X-Frame-Options", "deny"), ("Strict-Transport-Security", "max-age=0"))), True),
        (replace(SAFE, users={"alice": HASH, "bob": HASH.replace("$04$", "$03$")}), True),
        (replace(SAFE, users={"alice": HASH, "carol": HASH}), True),
        (WebConfig(), True),
        (replace(SAFE, users={"bob": HASH}), False),
        (replace(SAFE, headers=(("X-Content-Type-Options", "nosniff"), *SAFE.headers)), False),
        (SAFE, False),
    ],
)
def test_protection_that_is_lowered_is_noticed(now: WebConfig, is_lower: bool) -> None:
    """Passwords, TLS, client certificates, TLS versions and headers; another user or one header more is no loss."""
    assert is_lower == (lowered(SAFE, now) is not None)
    assert lowered(WebConfig(), now) is None


def status(told: Told, *, password: str | None = None) -> int:
    """What the daemon answers with or without a password."""
    request = urllib.request.Request(f"{told.daemon.address}/-/healthy")
    if password is not None:
        request.add_header("Authorization", basic("alice", password))
    try:
        with urllib.request.urlopen(request, timeout=LONG_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_reload_that_takes_passwords_away_is_refused(tmp_path: Path) -> None:
    """A reload without valid passwords keeps the previous ones in force, and the log gives the reason."""
    web = tmp_path / "web.yml"
    web.write_text(USERS + FRAMES)
    with configured("--listen", "127.0.0.1:0", "--web-config", str(web)) as told:
        assert (401, 200) == (status(told), status(told, password=RIGHT))
        for text in ("", "{}", FRAMES, "basic_auth_users: {}\n", "[1", USERS):
            web.write_text(text)
            line = told.changed()
            assert "error" == line["level"]
            assert str(web) in line["reason"]
            assert (401, 200) == (status(told), status(told, password=RIGHT))
        web.unlink()
        assert "error" == told.changed()["level"]
        assert 401 == status(told)

        # users come in by a reload, THEN they do not go by the next
        web.write_text(FRAMES + USERS)
        assert "reloaded" == told.changed()["state"]
        assert (401, 200) == (status(told), status(told, password=RIGHT))


def test_passwords_that_a_reload_brought_are_not_taken_away_by_the_next(tmp_path: Path) -> None:
    """What counts is what holds now, not what the daemon was started with."""
    web = tmp_path / "web.yml"
    web.write_text(FRAMES)
    with configured("--listen", "127.0.0.1:0", "--web-config", str(web)) as told:
        assert 200 == status(told)
        web.write_text(USERS + FRAMES)
        assert "reloaded" == told.changed()["state"]
        assert 401 == status(told)
        web.write_text(FRAMES)
        assert "error" == told.changed()["level"]
        assert 401 == status(told)


def test_a_reload_does_not_stop_to_check_certificates(tmp_path: Path) -> None:
    """`insecure` in a reloaded file is refused: the API key would be sent to an unverified server."""
    config = tmp_path / "kvdiag.toml"
    config.write_text('[serve]\nurl = "https://127.0.0.1:1"\n')
    with configured("--listen", "127.0.0.1:0", "--config", str(config)) as told:
        config.write_text('[serve]\nurl = "https://127.0.0.1:1"\ninsecure = true\n')
        line = told.changed()
        assert "error" == line["level"]
        assert "insecure" in line["reason"]


GUESSES = 40


def test_guesses_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that hangs up at once has no more passwords of a user looked at than one that waits."""

    async def play() -> int:
        passwords = Passwords({"alice": HASH})
        looked_at = 0
        check = bcrypt.checkpw

        def counted(password: bytes, hashed: bytes) -> bool:
            nonlocal looked_at
            looked_at += 1
            return check(password, hashed)

        monkeypatch.setattr(bcrypt, "checkpw", counted)
        try:
            for number in range(20):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await passwords.allow(basic("alice", str(number)), "10.0.0.66")
        finally:
            passwords.close()
        return looked_at

    assert 2 >= asyncio.run(play())


@pytest.mark.parametrize(
    ("guesser", "guessed"),
    [
        pytest.param("10.0.0.66", "alice", id="another address, a user's name"),
        pytest.param("10.0.0.1", "nobody", id="the same address, unknown names"),
        pytest.param("2001:db8:6::", "alice", id="many addresses of one network"),
    ],
)
def test_guesses_lock_nobody_else_out(guesser: str, guessed: str) -> None:
    """While one client guesses as fast as it can, users who come for the first time are let in."""

    async def play() -> list[bool | None]:
        passwords = Passwords({f"user-{number}": HASH for number in range(6)} | {"alice": SLOW_HASH})
        guesses = [
            asyncio.create_task(
                passwords.allow(basic(guessed, str(number)), f"{guesser}{number:x}" if ":" in guesser else guesser)
            )
            for number in range(GUESSES)
        ]
        try:
            await asyncio.sleep(0)
            return await asyncio.gather(
                *(passwords.allow(basic(f"user-{number}", "secret"), "10.0.0.1") for number in range(6))
            )
        finally:
            for guess in guesses:
                guess.cancel()
            await asyncio.gather(*guesses, return_exceptions=True)
            passwords.close()

    assert [True] * 6 == asyncio.run(play())


def test_a_crowd_of_guesses_is_answered_at_once() -> None:
    """All but a few: they would hold the connections of others for as long as they wait."""

    async def play() -> int:
        passwords = Passwords({"alice": SLOW_HASH})
        guesses = [
            asyncio.create_task(passwords.allow(basic("alice", str(number)), "10.0.0.66")) for number in range(300)
        ]
        try:
            for _ in range(10):
                await asyncio.sleep(0)
            return sum(guess.done() and guess.result() is None for guess in guesses)
        finally:
            for guess in guesses:
                guess.cancel()
            await asyncio.gather(*guesses, return_exceptions=True)
            passwords.close()

    assert 300 - MAX_WAITING == asyncio.run(play())


def test_a_wrong_password_is_wrong_where_as_many_right_ones_are_remembered() -> None:
    """It is the one that is forgotten first, once it was answered."""
    users = {f"user-{number}": HASH for number in range(MAX_REMEMBERED)}

    async def play() -> tuple[set[bool | None], bool | None]:
        passwords = Passwords(users)
        try:
            right = {await passwords.allow(basic(user, "secret"), "10.0.0.1") for user in users}
            return right, await passwords.allow(basic("user-0", "wrong"), "10.0.0.1")
        finally:
            passwords.close()

    assert ({True}, False) == asyncio.run(play())


def test_a_client_that_hangs_up_gives_its_turn_away() -> None:
    """Cancelled password checks, whose client has disconnected, release their lock."""

    async def play() -> tuple[bool | None, int]:
        passwords = Passwords({"alice": HASH})
        try:
            guesses = [
                asyncio.create_task(passwords.allow(basic("alice", str(number)), "10.0.0.66")) for number in range(5)
            ]
            await asyncio.sleep(0.01)
            assert list(map(asyncio.Task.cancel, guesses))
            await asyncio.gather(*guesses, return_exceptions=True)
            right = await passwords.allow(basic("alice", "secret"), "10.0.0.66")
            guesses.clear()
            gc.collect()
            return right, len(passwords._locks)  # noqa: SLF001 - no client can see it
        finally:
            passwords.close()

    assert (True, 0) == asyncio.run(play())


def test_an_authorization_that_is_no_text_is_refused() -> None:
    """Nothing of it is looked at, wherever it comes from."""

    async def play() -> bool | None:
        passwords = Passwords({"alice": HASH})
        try:
            return await passwords.allow("Basic " + base64.b64encode(b"\xff").decode(), "no address")
        finally:
            passwords.close()

    assert False is asyncio.run(play())
