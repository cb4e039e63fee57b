"""The pool that llama.cpp's command line shows, by what servers of these flags reported."""

import pytest

from kvdiag.engines import is_server_title
from kvdiag.engines.llamacpp.command_line import Cells, Options, parse_options, pool_cells, runners_of
from kvdiag.sources.host import NO_ENVIRONMENT
from tests.unit.engines.llamacpp.llama_answers import options

TRAINED = 32768
"""Of the measured models."""

MEASURED = [
    # Flags, slots, tokens of a slot, cells of all streams: each is one start of b11549.
    ("-c 8192 -np 4", 4, 2048, 8192),
    ("-c 1000 -np 8", 8, 256, 2048),
    ("-c 5000 -np 3", 3, 1792, 5376),
    ("-c 65536", 4, 32768, 65536),
    ("-c 8192 -ctk q5_1 -ctv q5_0 -fa on", 4, 8192, 8192),
    ("-c 4096 -np 2", 2, 2048, 4096),
    ("-c 8192 -np 1", 1, 8192, 8192),
    ("-c 65536 -np 1", 1, 32768, 65536),
    ("-c 4096 -np 8", 8, 512, 4096),
    ("-c 4096 -fa off", 4, 4096, 4096),
    ("-c 8192 -np 4 -kvu", 4, 8192, 8192),
    ("-c 8192 -no-kvu", 4, 2048, 8192),
    ("", 4, 32768, 32768),
    ("-c 0 -np 4", 4, 8192, 32768),
]


@pytest.mark.parametrize(("flags", "slots", "slot_tokens", "cells"), MEASURED, ids=lambda value: str(value) or "none")
def test_measured_pools_are_computed_to_the_cell(flags: str, slots: int, slot_tokens: int, cells: int) -> None:
    """Requests can hold what all slots together may have of it."""
    found = pool_cells(options(f"llama-server {flags}"), slots=slots, slot_tokens=slot_tokens, trained_tokens=TRAINED)
    assert isinstance(found, Cells)
    assert (cells, min(cells, slots * slot_tokens)) == (found.total, found.usable)


def test_a_lone_slot_shows_its_pool_by_itself() -> None:
    """No command line is needed."""
    assert Cells(total=4096, usable=4096) == pool_cells(None, slots=1, slot_tokens=4096, trained_tokens=None)


def test_several_slots_without_a_command_line_leave_the_pool_unknown() -> None:
    """Whether they share it differs by their number: nothing is guessed."""
    assert isinstance(pool_cells(None, slots=4, slot_tokens=4096, trained_tokens=TRAINED), str)


def test_the_environment_counts_below_the_command_line() -> None:
    """llama-server reads LLAMA_ARG_* first; `host.commands` puts them in front."""
    shown = options("LLAMA_ARG_CTX_SIZE=8192 LLAMA_ARG_N_PARALLEL=2 LLAMA_ARG_KV_UNIFIED=1 llama-server -c 4096")
    assert (4096, 2, True) == (shown.context_tokens, shown.slots, shown.unified)
    off = options("LLAMA_ARG_KV_UNIFIED=off llama-server")
    assert off.unified is False


HIDDEN = f"{NO_ENVIRONMENT} llama-server"


@pytest.mark.parametrize(
    ("command", "slot_tokens", "expected"),
    [
        pytest.param(f"{HIDDEN} -c 8192", 8192, 8192, id="shared by the slots' size"),
        pytest.param(f"{HIDDEN} -c 8192", 2048, 8192, id="split by the slots' size"),
        pytest.param(f"{HIDDEN} -kvu", 8192, 8192, id="asked for"),
        pytest.param(HIDDEN, 8192, None, id="no context on the command line"),
        pytest.param(f"{HIDDEN} -c 262144", 32768, None, id="both have slots of the trained context"),
    ],
)
def test_an_unreadable_environment_is_not_guessed(command: str, slot_tokens: int, expected: int | None) -> None:
    """It may set what the command line does not; the slots' size then decides, where it can."""
    found = pool_cells(options(command), slots=4, slot_tokens=slot_tokens, trained_tokens=TRAINED)
    assert expected == (found.total if isinstance(found, Cells) else None)


def test_the_slots_size_decides_where_flags_override_one_another() -> None:
    """Without -np, --no-kv-unified has no effect: the slots share their cells (tools/server/server.cpp)."""
    found = pool_cells(options("llama-server -c 8192 -no-kvu"), slots=4, slot_tokens=8192, trained_tokens=TRAINED)
    assert Cells(total=8192, usable=8192) == found


def test_a_command_line_that_does_not_meet_the_slots_is_refused() -> None:
    """The process was taken for the server's, or the build rounds in another way."""
    found = pool_cells(options("llama-server -c 4096"), slots=4, slot_tokens=8192, trained_tokens=TRAINED)
    assert isinstance(found, str)


def test_a_limit_for_each_slot_leaves_the_pool_larger() -> None:
    """--kv-unified-per-slot: without -c the pool is sized to all slots, and none has more than its share."""
    shown = options("llama-server --kv-unified-per-slot 1024")
    assert Cells(total=4096, usable=4096) == pool_cells(shown, slots=4, slot_tokens=1024, trained_tokens=TRAINED)
    shown = options("llama-server -c 32768 --kv-unified-per-slot 1024")
    assert Cells(total=32768, usable=4096) == pool_cells(shown, slots=4, slot_tokens=1024, trained_tokens=TRAINED)


def test_the_server_is_found_among_its_processes() -> None:
    """The wheel's server is a Python process; a shell is none."""
    shown = parse_options(["", "sh -c sleep", "python llama_server.py --model x.gguf --parallel 2 -c 512"])
    assert shown == Options(context_tokens=512, slots=2, model="x.gguf")
    assert parse_options(["/bin/kvdiag drill llamacpp-healthy"]) is not None
    assert parse_options(["bash", ""]) is None


@pytest.mark.parametrize("model", ["--model /models/tiny.gguf", "--hf-repo ggml-org/tiny.gguf"])
def test_a_routers_models_are_found(model: str) -> None:
    """It starts a model of its cache of downloads by its repository, others by their file (server_model_meta)."""
    command = f"/usr/bin/llama serve --alias tiny --host 127.0.0.1 {model} --port 45157"
    (found,) = runners_of(["/usr/bin/llama serve --port 8080 --models-dir /models", command])
    assert found.address == "tiny.gguf at http://127.0.0.1:45157"
    assert is_server_title(command)
    assert parse_options([command]) is not None


@pytest.mark.parametrize("value", ["-1", "0", "x", "", "1e9", "9" * 40, "1.5"])
def test_a_value_that_is_no_number_is_the_default(value: str) -> None:
    """0 and -1 ask for the default."""
    shown = options(f"llama-server -m x -c {value} -np {value} -ctk {value} --sleep-idle-seconds {value}")
    assert (None, None, "f16", None) == (
        shown.context_tokens,
        shown.slots,
        shown.type_k,
        shown.sleep_idle_seconds,
    )


def test_speculation_is_read() -> None:
    """Drafted tokens multiply the states; an n-gram speculates without a draft model."""
    found = options("llama-server -m a.gguf --spec-type draft-mtp --spec-draft-n-max 2")
    assert ("draft-mtp", 2, True) == (found.spec_type, found.draft_tokens, found.drafts)
    assert not options("llama-server -m a.gguf --spec-type ngram-mod").drafts
    assert "none" == options("llama-server -m a.gguf").spec_type
