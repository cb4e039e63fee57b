"""Keys and passwords go only to addresses that the user named, never to one that was found, nor on with a redirect."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdiag.commands import main
from kvdiag.commands.connect import Finder
from kvdiag.commands.options import report_file
from kvdiag.commands.options.common import ServerAccess
from kvdiag.commands.options.serve_options import LISTEN
from kvdiag.errors import KvdiagError
from kvdiag.sources import host
from kvdiag.sources.model_files import read_model
from tests.fixtures.hostile import Hostile, Peer, reply

pytestmark = pytest.mark.xdist_group("usual ports")

GIVEN = "s3cret-of-the-owner"
FAST = ("--once", "--tick-seconds", "0.05")


class Stranger:
    """A listener on one of the usual ports that wants a key, and keeps every header that it is sent."""

    def __init__(self) -> None:
        """Nothing was sent yet."""
        self.heads: list[bytes] = []

    def __call__(self, peer: Peer) -> None:
        """Keep what was sent, and want more."""
        self.heads.append(peer.request_head.lower())
        reply("", status=401)(peer)

    @property
    def was_given_a_secret(self) -> bool:
        """Whether any request brought credentials."""
        return any(b"authorization" in head for head in self.heads)


@pytest.fixture
def stranger() -> Stranger:
    """A listener that must not receive credentials."""
    return Stranger()


@contextmanager
def at(port: int, stranger: Stranger) -> Iterator[Hostile]:
    """The stranger on a port that kvdiag tries by itself; the test is left out where another program has it."""
    try:
        server = Hostile(stranger, port=port)
    except OSError:
        pytest.skip(f"port {port} is in use")
    with server:
        yield server


@pytest.fixture
def found(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    """The stranger, on the only usual port that is open: those of this machine may be other programs'."""
    with Hostile(stranger) as server:
        monkeypatch.setattr(host, "PORTS", (server.port,))
        yield server


def test_a_server_that_was_found_is_not_given_the_key(found: Hostile, stranger: Stranger) -> None:
    """`kvdiag serve` without an address asks without the key, and says that a key goes to a named address alone."""

    async def find() -> str:
        finder = Finder(None, ServerAccess(api_key=GIVEN), own_port=1)
        try:
            with pytest.raises(KvdiagError) as refusal:
                await finder.find()
        finally:
            await finder.close()
        return str(refusal.value)

    reason = asyncio.run(find())
    assert stranger.heads
    assert not stranger.was_given_a_secret
    assert f"{found.url}: 401" in reason
    assert "requires an API key" in reason


def test_a_server_that_was_named_is_given_the_key(found: Hostile, stranger: Stranger) -> None:
    """The same listener gets it once its address is given."""

    async def find() -> None:
        finder = Finder(found.url, ServerAccess(api_key=GIVEN), own_port=1)
        try:
            with pytest.raises(KvdiagError):
                await finder.find()
        finally:
            await finder.close()

    asyncio.run(find())
    assert stranger.heads
    assert all(f"bearer {GIVEN}".encode() in head for head in stranger.heads)


@pytest.mark.parametrize("command", [["doctor"], ["top", *FAST]], ids=["doctor", "top"])
def test_commands_that_search_keep_the_key(
    command: list[str], found: Hostile, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command that looks for a server by itself asks it without the key from the environment."""
    monkeypatch.setenv("KVDIAG_API_KEY", GIVEN)
    assert found.url
    main(command)
    assert stranger.heads
    assert not stranger.was_given_a_secret


@pytest.mark.parametrize("secret", [["--password", GIVEN], ["--password-file", "password"]], ids=["value", "file"])
def test_a_daemon_that_was_found_is_not_given_the_password(
    secret: list[str],
    stranger: Stranger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`kvdiag top --user` without an address asks the usual port without the password, and says what is missing."""
    monkeypatch.chdir(tmp_path)
    Path("password").write_text(GIVEN)
    with at(int(LISTEN.rpartition(":")[2]), stranger):
        code = main(["top", "--user", "alice", *secret, *FAST])
    assert 3 == code
    assert stranger.heads
    assert not stranger.was_given_a_secret
    assert "--attach" in capsys.readouterr().out


def test_a_token_of_the_hub_stays_with_the_hub(
    stranger: Stranger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redirect to another host is followed without the token."""
    with Hostile(stranger) as elsewhere:
        location = f"http://127.0.0.1:{elsewhere.port}/config.json"
        with Hostile(reply("", status=302, Location=location)) as hub:
            monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
            monkeypatch.setenv("HF_TOKEN", GIVEN)
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            with pytest.raises(KvdiagError):
                read_model("some/model")
    assert stranger.heads
    assert not stranger.was_given_a_secret


@pytest.mark.parametrize("command", ["doctor", "audit", "run", "top"])
@pytest.mark.parametrize("port", [1, 99_999])
def test_a_password_in_an_address_is_not_printed(command: str, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither by an error nor by a result, whether the address can be used or not."""
    arguments = FAST if command == "top" else ()
    main([command, "--url", f"http://alice:{GIVEN}@127.0.0.1:{port}", *arguments])
    printed = capsys.readouterr()
    assert GIVEN not in printed.out + printed.err
    assert printed.out + printed.err


@pytest.mark.parametrize(
    "address", [f"http://alice:{GIVEN}@a", f"alice:{GIVEN}@a", f"http://alice:{GIVEN[0]}@/{GIVEN}@a", f"a/?k={GIVEN}"]
)
def test_a_password_in_an_address_is_not_reported(address: str) -> None:
    """The command line that a report repeats has the host alone."""
    assert "a" in report_file._address(address)  # noqa: SLF001 - the one place where it is cut
    assert GIVEN not in report_file._address(address)  # noqa: SLF001 - as above
