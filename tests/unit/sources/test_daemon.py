"""A daemon's pages read back: all that a frame shows survives, and what cannot be is refused in one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.commands.options.daemon_url import open_daemon
from kvdiag.model import Snapshot
from kvdiag.outputs.terminal.top_frame import View
from kvdiag.server.endpoints import Pages
from kvdiag.server.request import Request
from kvdiag.sources.daemon_client import MAX_PAGE_CHARACTERS, NAMES, DaemonReading, DaemonSource, parse, parse_diagnosis
from kvdiag.sources.http import HttpReader, Unreadable
from kvdiag.sources.prometheus_text import parse_page
from tests.builders.values import NO_NVML
from tests.builders.worlds import WORLDS, World
from tests.fixtures.hostile import Answer, Hostile, reply, reply_json, silent
from tests.unit.outputs.test_top import eight_gpus, of, screen, unread, view, with_snapshot

PATHS = {"metrics": "/metrics", "ledger": "/api/v1/ledger", "diagnosis": "/api/v1/diagnosis"}


def pages(snapshot: Snapshot) -> dict[str, str]:
    """What a daemon with this snapshot answers, by what it is."""
    shown = Pages(newest=lambda: snapshot)
    return {
        name: shown.answer(Request(method="GET", path=path, names=NAMES if name == "metrics" else ())).body.decode()
        for name, path in PATHS.items()
    }


@cache
def healthy() -> dict[str, str]:
    """The pages of a daemon beside a healthy server."""
    return pages(view().snapshot)


def read_back(snapshot: Snapshot) -> DaemonReading:
    """What its reader makes of that."""
    found = pages(snapshot)
    diagnosis = None if snapshot.diagnosis is None else parse_diagnosis(json.loads(found["diagnosis"]))
    return parse(parse_page(found["metrics"]), json.loads(found["ledger"]), diagnosis)


def ask(url: str, **options: Any) -> DaemonReading:
    """One reading of a daemon at an address."""
    usual = {"user": None, "password": None, "password_file": None, "ca_file": None, "insecure": False}

    async def asked() -> DaemonReading:
        async with open_daemon(url, **{**usual, **options}) as client:
            return await DaemonSource(HttpReader(client, seconds=1.0)).read()

    return asyncio.run(asked())


def answering(**changed: Answer) -> dict[str, Answer]:
    """The pages of a daemon beside a healthy server, some of them other than they should be."""
    usual = {
        PATHS[name]: reply(text, content_type="text/plain" if name == "metrics" else "application/json")
        for name, text in healthy().items()
    }
    return {**usual, **{PATHS[name]: answer for name, answer in changed.items()}}


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
    return tuple(replace(one, up=one.source != "engine") for one in view().snapshot.sources)


@pytest.mark.parametrize("name", VIEWS)
def test_the_frame_is_the_same_as_beside_the_server(name: str) -> None:
    """Whoever looks through a daemon sees what it would show itself."""
    # GIVEN
    shown = VIEWS[name]()

    # WHEN
    reading = read_back(shown.snapshot)

    # THEN
    again = View(snapshot=reading.snapshot, lines=reading.lines, origin=shown.origin)
    assert screen(shown, 80, None) == screen(again, 80, None)


def test_it_is_read_over_http() -> None:
    """Three GETs, of which only the needed series are asked for; the diagnosis again when there is another."""
    # GIVEN
    with Hostile(answering()) as server:

        async def asked() -> tuple[DaemonReading, DaemonReading]:
            async with open_daemon(
                f"{server.url}/metrics", user=None, password=None, password_file=None, ca_file=None, insecure=False
            ) as client:
                source = DaemonSource(HttpReader(client))
                return await source.read(), await source.read()

        # WHEN
        first, second = asyncio.run(asked())

    # THEN
    assert first == second
    assert "ok" == (first.snapshot.diagnosis.worst if first.snapshot.diagnosis else None)
    assert [*PATHS.values(), "/metrics", "/api/v1/ledger"] == [path.partition("?")[0] for path in server.requests]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"metrics": reply("", status=401)},
            "authentication required: pass --attach URL, --user",
        ),
        ({"metrics": reply("", status=403)}, "it does not let us in"),
        ({"ledger": reply("", status=404)}, "there is no /api/v1/ledger: is it `kvdiag serve`, and of this version"),
        ({"metrics": reply("up 1\n")}, "is not what `kvdiag serve` does: its page has no kvdiag_build_info"),
        ({"metrics": reply("<html>")}, "is not what `kvdiag serve` does"),
        ({"metrics": reply("# " + "x" * MAX_PAGE_CHARACTERS)}, "its page is too large"),
        ({"ledger": reply_json([])}, "something else stands where an object should"),
        ({"ledger": reply_json({"schema_version": 3})}, "its documents have version 3"),
        ({"diagnosis": reply("nope")}, "not JSON"),
        ({"diagnosis": reply_json({"schema_version": 1, "window": {}, "worst": "fine"})}, "'fine' is no status"),
        ({"ledger": silent()}, "no whole answer within 1 s"),
    ],
)
def test_a_bad_answer_is_told_in_one_line(changed: dict[str, Answer], reason: str) -> None:
    """Each has its cause, and what to look at."""
    # GIVEN
    with Hostile(answering(**changed)) as server, pytest.raises(Unreadable) as raised:
        # WHEN
        ask(server.url)

    # THEN
    assert reason in str(raised.value)


def test_no_diagnosis_yet_is_no_error() -> None:
    """A daemon that has lost its diagnosis between two answers has none."""
    # GIVEN
    with Hostile(answering(diagnosis=reply_json({"error": "there is no diagnosis yet"}, status=503))) as server:
        # THEN
        assert ask(server.url).snapshot.diagnosis is None


def test_name_and_password_are_sent() -> None:
    """From the options, or from the address, in which they are not shown again."""
    # GIVEN
    heads: list[bytes] = []
    with Hostile(lambda peer: heads.append(peer.request_head)) as server:
        address = server.url.removeprefix("http://")

        # WHEN
        for url, options in ((server.url, {"user": "u", "password": "p:w"}), (f"http://u:p%3Aw@{address}", {})):
            with pytest.raises(Unreadable):
                ask(url, **options)

    # THEN
    assert 2 == sum(b"\r\nauthorization: basic dtpwonc=\r\n" in head.lower() + b"\r\n" for head in heads)


PLACES = [
    ("devices", 0, "total_bytes"),
    ("devices", 0, "uuid"),
    ("devices", 0, "gpu"),
    ("ledger", 0, "bytes"),
    ("ledger", 0, "component"),
    ("subject", "pools", 0, "usable_blocks"),
    ("subject", "max_model_len_tokens"),
    ("subject", "model"),
    ("gaps",),
    ("devices",),
]
WRONG = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text() | st.lists(st.none())


@settings(max_examples=50, deadline=None)
@given(place=st.sampled_from(PLACES), value=WRONG)
def test_any_value_in_any_place_is_read_or_refused(place: tuple[str | int, ...], value: object) -> None:
    """A ledger's document that holds anything whatever makes a frame, or the one error."""
    # GIVEN
    page, document = parse_page(healthy()["metrics"]), json.loads(healthy()["ledger"])
    inner: Any = document
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value

    # WHEN
    try:
        reading = parse(page, document, None)
    except (ValueError, TypeError):
        return

    # THEN
    assert screen(of(reading.snapshot)) != []


def test_a_gpu_that_is_not_there_stays_unseen() -> None:
    """No device is made up where the daemon sees none."""
    # THEN
    assert read_back(view(World(nvml=NO_NVML)).snapshot).snapshot.newest.devices is None
