"""Incidents in which a start, or a moment of serving, met too little room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvdiag.model import Gap
from tests.quality.corpus.incident import Record, Shape, host_of, kv_pool, server
from tests.quality.corpus.recording import NOT_UP, Holder, Pages, Recording, Torch, serving
from tests.quality.corpus.tape import GIB, Tape, Track


def _starting(
    tape: Tape, shape: Shape, *, levels: tuple[tuple[float, float], ...], version: str | None = None
) -> Recording:
    """A server that never comes up: what it holds of each GPU by the minute."""
    held = tape.levels(*((minute / 60.0, gib * GIB) for minute, gib in levels))
    cards = shape.cards(tape)
    cards = tuple(replace(card, holders=(replace(card.holders[0], held=held),)) for card in cards)
    pages: Pages = [NOT_UP for _ in tape.hours]
    facts = shape.facts(pools=(), engine_version=version or shape.version, max_model_len_tokens=None)
    return Recording(tape=tape, pages=pages, gpus=cards, host=host_of(tape, grown={}, ranks=shape.gpus), facts=facts)


def _nccl_cumem(tape: Tape) -> Recording:
    shape = Shape(gpus=4, version="0.4.2")
    levels = ((0.0, 0.5), (1.0, 2.1), (2.0, 15.4), (5.0, 71.5), (7.0, 74.0), (8.0, 77.0), (9.0, 79.3), (10.0, 0.0))
    return _starting(tape, shape, levels=levels)


def _graphs(tape: Tape) -> Recording:
    shape = Shape(total_bytes=24 * GIB, weights_bytes=17 * GIB, version="0.29.1")
    levels = ((0.0, 0.4), (1.0, 17.9), (3.0, 20.2), (4.0, 23.1), (4.5, 23.25), (5.0, 23.4), (6.0, 0.0))
    return _starting(tape, shape, levels=levels)


def _no_estimate(tape: Tape) -> Recording:
    shape = Shape(version="0.27.0")
    levels = ((0.0, 0.5), (1.0, 16.0), (4.0, 77.8), (5.0, 78.6), (6.0, 79.4), (7.0, 0.0))
    return _starting(tape, shape, levels=levels)


def _symmetric(tape: Tape) -> Recording:
    shape = Shape(total_bytes=184 * GIB, weights_bytes=90 * GIB, engine_name="sglang", asked=None, version="0.5.9")
    levels = ((0.0, 0.6), (1.0, 92.0), (5.0, 181.3), (6.0, 0.0))
    return _starting(tape, shape, levels=levels)


def _crashing(
    tape: Tape, shape: Shape, *, at_hour: float, torch: tuple[Torch, ...] = (), grown: tuple[Track, ...] = ()
) -> Recording:
    """A server that serves until it dies; the page is refused from then on, and its memory is free."""
    recording = server(tape, shape, torch=torch, grown=grown)
    gone: Gap = NOT_UP
    pages: Pages = [
        gone if hour >= at_hour else page for hour, page in zip(tape.hours, recording.pages or (), strict=True)
    ]
    cards = tuple(
        replace(
            card,
            holders=tuple(
                replace(one, held=_until(one.held, tape, at_hour))
                for one in card.holders
            ),
        )
        for card in recording.gpus
    )  # fmt: skip
    return replace(recording, pages=pages, gpus=cards)


def _until(track: Track, tape: Tape, at_hour: float) -> Track:
    return [0.0 if hour >= at_hour else value for hour, value in zip(tape.hours, track, strict=True)]


def _logprobs(tape: Tape) -> Recording:
    return _crashing(tape, Shape(version="0.8.4"), at_hour=2.9)


def _gonka(tape: Tape) -> Recording:
    """Eight deaths in a day, each followed by a start of six minutes."""
    shape = Shape(gpus=4, total_bytes=round(178.35 * GIB), weights_bytes=140 * GIB, fraction=0.979, version="0.20.0",
                  pool=kv_pool(24.0))  # fmt: skip
    deaths = [1.4 + 2.9 * number + tape.random.uniform(-0.8, 0.8) for number in range(8)]
    demand = tape.traffic(0.4)
    pages: Pages = [
        NOT_UP if any(at <= hour < at + 0.1 for at in deaths) else page
        for hour, page in zip(tape.hours, serving(tape, demand, shape.pool, restarts=deaths), strict=True)
    ]
    recording = server(tape, shape, demand=demand, pages=pages)
    cards = tuple(replace(card, holders=(_reborn(card.holders[0], tape, deaths),)) for card in recording.gpus)
    return replace(recording, gpus=cards)


def _reborn(one: Holder, tape: Tape, deaths: list[float]) -> Holder:
    held = [
        next((size * min((hour - at) / 0.1, 1.0) for at in reversed(deaths) if hour >= at), size)
        for hour, size in zip(tape.hours, one.held, strict=True)
    ]
    return replace(one, held=held)


def _long_inputs(tape: Tape) -> Recording:
    shape = Shape(gpus=8, fraction=0.94, engine_name="sglang", asked=None, version="0.4.6")
    return _crashing(tape, shape, at_hour=1.9)


def _second_run(tape: Tape) -> Recording:
    shape = Shape(
        total_bytes=24 * GIB,
        weights_bytes=13 * GIB,
        fraction=0.93,
        pool=kv_pool(7.0),
        engine_name="sglang",
        asked=None,
        version="0.1.9",
    )
    recording = _crashing(tape, shape, at_hour=0.96)
    demand = tape.of(lambda hour: 0.9 if hour < 0.4 or hour > 0.6 else 0.0)
    pages: Pages = [
        NOT_UP if hour >= 0.96 else page
        for hour, page in zip(tape.hours, serving(tape, demand, shape.pool), strict=True)
    ]
    return replace(recording, pages=pages)


CRASH_INCIDENTS: Mapping[str, Record] = {
    "dev-nccl-cumem": _nccl_cumem,
    "frag-sglang-109": _second_run,
    "act-logprobs-5907": _logprobs,
    "act-gonka": _gonka,
    "act-6027": _long_inputs,
    "base-srt-172": _symmetric,
    "cg-57475": _graphs,
    "cg-49224": _no_estimate,
}
