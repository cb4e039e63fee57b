"""What Ollama's list of loaded models and its processes say, and what is left out of them."""

import pytest

from kvdiag.engines.llamacpp.command_line import runners_of
from kvdiag.engines.ollama import ENGINE
from kvdiag.engines.ollama.runners import (
    Loaded,
    distinct,
    label_of,
    labelled,
    loaded_models,
    loaded_page,
    parse_engines,
    parse_pools,
)
from kvdiag.sources.prometheus_text import Series

CHILD = "/usr/lib/ollama/llama-server --model /blobs/sha256-0123456789abcdef --port 38291 -c 8192 -np 2"
ONE = Loaded(name="a:latest", size_bytes=3, device_bytes=2, context_tokens=4096)
TWO = Loaded(name="b:latest", size_bytes=3, device_bytes=2, context_tokens=2048)


def slots_of_two(label: str) -> dict[str, tuple[Series, ...]]:
    """The series of a runner with two slots, of which one processes a request."""
    both = (("0", 100.0, 1.0), ("1", 900.0, 0.0))
    page = {
        "llamacpp:slot_tokens": tuple(Series({"id": number}, tokens) for number, tokens, _ in both),
        "llamacpp:slot_processing": tuple(Series({"id": number}, busy) for number, _, busy in both),
        "llamacpp:slot_context_tokens": tuple(Series({"id": number}, 4096.0) for number, _, _ in both),
        "llamacpp:slots": (Series({}, 2.0),),
        "llamacpp:cells": (Series({}, 8192.0),),
        "ollama:runner_port": (Series({}, 38291.0),),
    }
    return dict(labelled(page, label))


def test_each_model_is_an_engine_with_its_own_pool() -> None:
    """The child's slots and command line are llama.cpp's."""
    page = {**loaded_page([ONE]), **slots_of_two("a:latest")}
    engines, gaps = parse_engines(page)
    assert engines is not None
    assert [("a:latest", 1, 0, 100 / 8192, False)] == [
        (one.engine, one.requests_running, one.requests_waiting, one.kv_usage_ratio, one.asleep) for one in engines
    ]
    (pool,), pool_gaps = parse_pools(page, None, ["ollama serve", CHILD])
    assert ("a:latest", 8192, 2, (), 1) == (pool.engine, pool.usable_blocks, pool.max_requests, gaps, len(pool_gaps))


def test_no_loaded_model_is_asleep_and_no_fault() -> None:
    """Its memory has been released, as of a server that sleeps."""
    engines, gaps = parse_engines(loaded_page([]))
    assert engines is not None
    assert (True, True, ()) == (engines[0].asleep, engines[0].idle, gaps)
    assert ((), ()) == parse_pools(loaded_page([]), None, [])


def test_a_model_whose_server_is_hidden_is_unknown() -> None:
    """On another host, or as another user: nothing is shown as idle."""
    engines, (gap,) = parse_engines(loaded_page([ONE]))
    assert (None, "absent") == (engines, gap.kind)
    pools, (gap,) = parse_pools(loaded_page([ONE]), None, [])
    assert ((), "absent") == (pools, gap.kind)


def test_a_runner_is_named_by_its_context_alone_if_no_other_model_has_it() -> None:
    """Two models may have one context: then its file names it."""
    (runner,) = runners_of(["ollama serve", CHILD, "llama-server --port 99999 --model x"])
    page = {"llamacpp:slot_context_tokens": (Series({}, 4096.0),)}
    assert ("a:latest", "0123456789ab") == (label_of(runner, page, [ONE, TWO]), label_of(runner, page, [ONE, ONE]))
    assert ["a", "b #1", "b #2"] == distinct(["a", "b", "b"])


@pytest.mark.parametrize("answer", [None, 7, [], {}, {"models": 7}, {"models": [7, {}, {"name": 7}, {"name": ""}]}])
def test_an_answer_that_lists_no_model_has_none(answer: object) -> None:
    """Another program may have that address."""
    assert () == loaded_models(answer)


@pytest.mark.parametrize("size", [-1, 2**60, 1.5, "7", True, None])
def test_an_impossible_size_is_missing(size: object) -> None:
    """The model is loaded all the same."""
    (model,) = loaded_models({"models": [{"name": "a", "size": size, "size_vram": size, "context_length": size}]})
    assert (None, None) == (model.size_bytes, model.device_bytes)


def test_its_capabilities_follow_from_what_is_visible() -> None:
    """With its models' servers cells are counted; without, only which models are loaded is known."""
    assert (True, False) == (ENGINE.capabilities(slots_of_two("a")).blocks, ENGINE.capabilities(loaded_page([])).blocks)
