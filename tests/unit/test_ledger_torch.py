"""The ledger with agents' reports: every level adds up to the one above it, with a rest of its own."""

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.ledger import ledger
from kvdiag.model import Allocator, Facts, LedgerLine, Sample
from tests.builders.ledger_lines import POOL_BYTES, SERVER, sizes
from tests.builders.values import GIB, MIB, allocator, device, engine, holding, pool, process, split

BLOCK = 2 * MIB
TORCH = (
    "weights",
    "kv_pool",
    "kv_held",
    "kv_free",
    *tuple(f"torch_{part}" for part in ("other", "pending", "private", "releasable", "stranded", "unused")),
)
HELD = POOL_BYTES + 6 * GIB

BUSY = allocator(
    allocated_bytes=HELD + 700 * MIB,
    active_bytes=HELD + 701 * MIB,
    reserved_bytes=HELD + 1024 * MIB,
    process_bytes=HELD + 1524 * MIB,
    split=split(
        reserved_bytes=HELD + 1024 * MIB,
        live_bytes=HELD + 700 * MIB,
        pending_bytes=1 * MIB,
        private_bytes=100 * MIB,
        releasable_bytes=200 * MIB,
        stranded_bytes=23 * MIB,
    ),
)


def lines(*allocators: Allocator, held: int = HELD + 1524 * MIB, of: Facts = SERVER) -> tuple[LedgerLine, ...]:
    """The ledger of a server alone on a GPU, of which requests hold 100 blocks."""
    gpu = device(used_bytes=held + 464 * MIB, processes=(process(100, held),))
    return ledger(Sample(at_seconds=1.0, devices=(gpu,), engines=(holding(100),), allocators=allocators), of)


def test_every_byte_of_a_server_has_its_line() -> None:
    """Pool by usage, weights, other memory in torch, what torch keeps and why, and memory outside torch.

    What torch counts is measured; the rest, inside torch and outside it, is computed.
    """
    actual = {line.component: (line.bytes, line.provenance) for line in lines(BUSY)}
    assert {
        "driver_reserved": (464 * MIB, "measured"),
        "kv_held": (100 * BLOCK, "reported"),
        "kv_free": (POOL_BYTES - 100 * BLOCK, "reported"),
        "weights": (6 * GIB, "computed"),
        "torch_other": (700 * MIB, "computed"),
        "torch_pending": (1 * MIB, "measured"),
        "torch_private": (100 * MIB, "measured"),
        "torch_releasable": (200 * MIB, "measured"),
        "torch_stranded": (23 * MIB, "measured"),
        "outside_torch": (500 * MIB, "computed"),
        "server_other": (0, "computed"),
        "unaccounted": (0, "computed"),
    } == actual


def test_a_pool_of_unknown_bytes_is_named_where_it_is() -> None:
    """In the rest of torch: the row says so, instead of passing 12 GiB for activations."""
    found = lines(BUSY, of=replace(SERVER, engine_name="vllm", pools=()))
    (line,) = [one for one in found if one.component == "torch_with_kv_pool"]
    assert POOL_BYTES + 700 * MIB == line.bytes
    assert line.detail.startswith("KV pool, ")
    assert "torch_other" not in sizes(found)


def test_split_of_another_moment_is_not_mixed_in() -> None:
    """Where torch has reserved more since its blocks were read, unused memory is not broken down."""
    grown = replace(BUSY, reserved_bytes=BUSY.reserved_bytes + 2 * MIB)
    actual = sizes(lines(grown))
    assert 325 * MIB == actual["torch_unused"]
    assert {"torch_pending": 1 * MIB, "torch_other": 700 * MIB} == {
        name: actual[name] for name in ("torch_pending", "torch_other")
    }
    assert not {"torch_releasable", "torch_stranded"} & set(actual)


def test_bytes_that_are_not_on_the_device_close_nothing() -> None:
    """Asleep, or under a pluggable allocator, torch counts what its process does not hold: the ledger is as without."""
    asleep = replace(BUSY, process_bytes=3 * GIB)
    assert lines(held=3 * GIB) == lines(asleep, held=3 * GIB)


@pytest.mark.parametrize(
    "other",
    [replace(BUSY, device_uuid="1"), replace(BUSY, pid=4242)],
    ids=["on another GPU", "not the server's"],
)
def test_allocator_of_something_else_changes_nothing(other: Allocator) -> None:
    """What another process holds, or holds elsewhere, is not the server's here."""
    assert lines() == lines(other)


def test_without_a_process_list_the_agents_tell() -> None:
    """In a container whose NVML lists no process, the figures of the server's own NVML replace the list."""
    gpu = device(used_bytes=HELD + 1524 * MIB + 464 * MIB + 7 * MIB, processes=None)
    actual = sizes(ledger(Sample(at_seconds=1.0, devices=(gpu,), allocators=(BUSY,)), SERVER))
    assert (500 * MIB, 0, 7 * MIB) == tuple(actual[name] for name in ("outside_torch", "server_other", "unaccounted"))


def test_two_readings_of_different_moments_leave_a_rest() -> None:
    """What the process has grown by between NVML's list and torch's figures is a line, and not hidden in another."""
    actual = sizes(lines(BUSY, held=HELD + 1530 * MIB))
    assert (500 * MIB, 6 * MIB) == (actual["outside_torch"], actual["server_other"])


@pytest.mark.parametrize(
    ("process_bytes", "held", "outside", "rest"),
    [
        (HELD + 1024 * MIB, HELD + 1024 * MIB, 0, 0),
        (None, HELD + 1524 * MIB, 500 * MIB, 0),
        (None, HELD + 1024 * MIB, 0, 0),
        (None, HELD + 1000 * MIB, 0, -24 * MIB),
    ],
    ids=["nothing beside torch", "by NVML's list", "by the list, nothing beside", "the list is of an earlier moment"],
)
def test_what_lies_beside_torch_by_whom_it_is_told(
    process_bytes: int | None, held: int, outside: int, rest: int
) -> None:
    """From inside the process where reported, else what NVML's list has above torch's 1,024 MiB, never below 0."""
    actual = sizes(lines(replace(BUSY, process_bytes=process_bytes), held=held))
    assert (outside, rest, 0) == (actual["outside_torch"], actual["server_other"], actual["unaccounted"])


def test_one_allocator_that_counts_what_is_elsewhere_spoils_the_sum() -> None:
    """Of two processes on one GPU one is asleep: torch's figures are left out of both."""
    asleep = replace(BUSY, pid=101, process_bytes=GIB)
    actual = sizes(lines(BUSY, asleep))
    assert not {name for name in actual if name.startswith(("torch", "outside"))}
    assert 1524 * MIB == actual["server_other"]


SIZES = st.integers(0, 20 * GIB)


@st.composite
def allocators(draw: st.DrawFn) -> Allocator:
    """Any allocator of GPU 0, its split of the same moment or of another."""
    parts = draw(st.tuples(*[SIZES] * 5))
    names = ("live_bytes", "pending_bytes", "private_bytes", "releasable_bytes", "stranded_bytes")
    told = split(reserved_bytes=sum(parts), **dict(zip(names, parts, strict=True)))
    moved = draw(st.sampled_from([0, 0, 2 * MIB]))
    return allocator(
        pid=draw(st.sampled_from([100, 101, 7])),
        pid_seen=draw(st.booleans()),
        allocated_bytes=parts[0],
        active_bytes=draw(st.sampled_from([None, parts[0] + parts[1]])),
        reserved_bytes=sum(parts) + moved,
        process_bytes=draw(st.none() | st.integers(0, 120 * GIB)),
        split=draw(st.sampled_from([None, told])),
    )


@settings(deadline=None)
@given(
    found=st.lists(allocators(), max_size=3),
    listed=st.none() | st.lists(st.tuples(st.sampled_from([100, 101, 7, 8]), st.none() | SIZES), max_size=3),
    used=st.integers(0, 190 * GIB),
    usage=st.none() | st.floats(0.0, 1.0),
    weights=st.none() | SIZES,
)
def test_every_level_adds_up(
    found: list[Allocator],
    listed: list[tuple[int, int | None]] | None,
    used: int,
    usage: float | None,
    weights: int | None,
) -> None:
    """The lines add up to the device, torch's to what torch has reserved, and only rests go below 0."""
    processes = None if listed is None else tuple(process(pid, size) for pid, size in listed)
    gpu = device(used_bytes=used, total_bytes=200 * GIB, processes=processes, driver_reserved_bytes=None)
    sample = Sample(at_seconds=1.0, devices=(gpu,), engines=(engine(usage=usage),), allocators=tuple(found))
    of = replace(SERVER, weights_bytes=weights)
    actual = ledger(sample, of)
    torch = [line.bytes for line in actual if line.component in TORCH]
    reserved = sum(each.reserved_bytes for each in found if not each.pid_seen or each.pid in (100, 101))
    closed = "outside_torch" in {line.component for line in actual}
    assert used == sum(line.bytes for line in actual)
    assert not closed or reserved == sum(torch)
    assert {line.component for line in actual if line.bytes < 0} <= {"unaccounted", "server_other", "torch_other"}
    assert all(len(list(same)) == 1 for name, same in groupby(actual, key=lambda line: line.component) if name in TORCH)


@pytest.mark.parametrize(
    ("caching", "possible"),
    [(True, True), (None, True), (False, False)],
)
def test_free_blocks_say_whether_prefixes_may_be_among_them(caching: bool | None, possible: bool) -> None:
    """A cached prefix without a request counts as free in vLLM; without prefix caching free blocks are empty."""
    server = replace(SERVER, pools=(pool(prefix_caching=caching),))
    (free,) = [line for line in lines(BUSY, of=server) if line.component == "kv_free"]
    assert possible == ("caching prefixes" in free.detail)
