"""A daemon's snapshot read back: all that a frame shows survives, and what cannot be is refused in one line."""

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.commands.options.common import ServerAccess
from kvdiag.commands.top import DaemonUser, open_daemon
from kvdiag.model import Lengths, Snapshot
from kvdiag.model.codec import from_plain
from kvdiag.outputs.terminal.top_frame import View
from kvdiag.server.endpoints import Pages
from kvdiag.server.request import Request
from kvdiag.sources.daemon_client import MAX_SNAPSHOT_CHARACTERS, PATH, DaemonReading, read_daemon
from kvdiag.sources.http import HttpReader, Unreadable
from tests.builders.worlds import WORLDS
from tests.fixtures.hostile import Answer, Hostile, reply, reply_json, silent
from tests.unit.outputs.test_top_frames import eight_gpus, of, screen, unread, view, with_snapshot


def page(snapshot: Snapshot) -> str:
    """What a daemon with this snapshot answers."""
    return Pages(newest=lambda: snapshot).answer(Request(method="GET", path=PATH)).body.decode()


@cache
def healthy() -> str:
    """The answer of a daemon for a healthy server."""
    return page(view().snapshot)


def read_back(snapshot: Snapshot) -> DaemonReading:
    """What its reader makes of that."""
    return from_plain(DaemonReading, json.loads(page(snapshot)), lenient=True)


def ask(url: str, **options: Any) -> DaemonReading:
    """One reading of a daemon at an address."""

    async def asked() -> DaemonReading:
        async with open_daemon(url, DaemonUser(**options), ServerAccess()) as client:
            return await read_daemon(HttpReader(client, seconds=1.0))

    return asyncio.run(asked())


def answering(changed: Answer | None = None) -> dict[str, Answer]:
    """The answers of a daemon for a healthy server, with its snapshot replaced where one is given."""
    return {PATH: changed or reply(healthy(), content_type="application/json")}


VIEWS: Mapping[str, Callable[[], View]] = {
    **{name: (lambda world=world: view(world)) for name, world in WORLDS.items()},  # type: ignore[misc]
    "eight GPUs": eight_gpus,
    "starting": unread,
    "lost": lambda: with_snapshot(
        view(), state="lost", newest=replace(view().snapshot.newest, engines=None), sources=down()
    ),
    "no diagnosis yet": lambda: with_snapshot(view(), diagnosis=None, diagnosed_seconds=None),
}


def down() -> tuple[Any, ...]:
    """The sources of a daemon whose server does not answer."""
    return tuple(replace(one, up=one.source not in ("engine", "vllm")) for one in view().snapshot.sources)


@pytest.mark.parametrize("name", VIEWS)
def test_the_frame_is_the_same_as_beside_the_server(name: str) -> None:
    """The frame of an attached daemon equals the daemon's own frame."""
    shown = VIEWS[name]()
    reading = read_back(shown.snapshot)
    again = View(snapshot=reading.snapshot, lines=reading.lines, origin=shown.origin)
    assert screen(shown, 80, None) == screen(again, 80, None)


def test_it_is_read_over_http() -> None:
    """One GET brings the snapshot, the ledger and the version."""
    with Hostile(answering()) as server:
        reading = ask(f"{server.url}/metrics")
    assert read_back(view().snapshot) == reading
    assert [PATH] == [path.partition("?")[0] for path in server.requests]


def test_fields_of_a_newer_daemon_are_skipped() -> None:
    """A daemon that knows more is read as far as this kvdiag knows it."""
    newer = json.loads(healthy())
    newer["moons"] = newer["snapshot"]["moons"] = newer["snapshot"]["newest"]["moons"] = [{"name": "Io"}]
    assert read_back(view().snapshot) == from_plain(DaemonReading, newer, lenient=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        pytest.param(reply("", status=401), "--password-file", id="no password"),
        pytest.param(reply("", status=403), "--user", id="another user"),
        pytest.param(reply("", status=404), PATH, id="an older daemon"),
        pytest.param(reply("<html>"), "not JSON", id="a web page"),
        pytest.param(reply_json([]), "must be an object", id="a list"),
        pytest.param(reply_json({"kvdiag_snapshot": 2}), "missing", id="another document"),
        pytest.param(reply(" " * (MAX_SNAPSHOT_CHARACTERS + 1)), "larger than 2 MiB", id="too large"),
        pytest.param(silent(), "within 1 s", id="no answer"),
    ],
)
def test_a_bad_answer_is_refused_with_its_cause(changed: Answer, reason: str) -> None:
    """The error names the cause or the next step."""
    with Hostile(answering(changed)) as server, pytest.raises(Unreadable, match=re.escape(reason)):
        ask(server.url)


def test_another_format_is_refused() -> None:
    """A snapshot that this kvdiag cannot understand is not shown."""
    with pytest.raises(ValueError, match="format 2"):
        from_plain(DaemonReading, {**json.loads(healthy()), "kvdiag_snapshot": 2})


def test_name_and_password_are_sent() -> None:
    """From the options, or from the address, in which they are not shown again."""
    heads: list[bytes] = []
    with Hostile(lambda peer: heads.append(peer.request_head)) as server:
        address = server.url.removeprefix("http://")
        for url, options in ((server.url, {"user": "u", "password": "p:w"}), (f"http://u:p%3Aw@{address}", {})):
            with pytest.raises(Unreadable):
                ask(url, **options)
    assert 2 == sum(b"\r\nauthorization: basic dtpwonc=\r\n" in head.lower() + b"\r\n" for head in heads)


PLACES = [
    ("snapshot", "newest", "devices", 0, "memory", "total_bytes"),
    ("snapshot", "newest", "devices", 0, "uuid"),
    ("snapshot", "newest", "devices"),
    ("snapshot", "facts", "pools", 0, "usable_blocks"),
    ("snapshot", "facts", "max_model_len_tokens"),
    ("snapshot", "facts", "model"),
    ("snapshot", "diagnosis", "findings", 0, "status"),
    ("snapshot", "state"),
    ("lines", 0, "bytes"),
    ("lines", 0, "component"),
]
WRONG = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text() | st.lists(st.none())


@settings(max_examples=50, deadline=None)
@given(place=st.sampled_from(PLACES), value=WRONG)
def test_any_value_in_any_place_is_read_or_refused(place: tuple[str | int, ...], value: object) -> None:
    """A snapshot with any wrong value in any place makes a frame or raises the one error."""
    document = json.loads(healthy())
    inner: Any = document
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    try:
        reading = from_plain(DaemonReading, document, lenient=True)
    except ValueError:
        return
    assert screen(of(reading.snapshot)) != []


def test_lengths_of_requests_stay_with_the_daemon() -> None:
    """Their last bucket has no upper bound, which JSON cannot say."""
    lengths = Lengths(upper_tokens=(128.0, math.inf), counts=(3, 1))
    assert read_back(replace(view().snapshot, lengths=lengths)).snapshot.lengths is None
