from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.ledger import ledger
from kvdiag.model import Device, Facts, KvPool, LedgerLine, Memory, Process, Sample, without_mig_parents
from tests.builders import GIB, MIB, WORLDS, World, device, engine, facts, judged, pool, process

POOL_BYTES = 6145 * 2 * MIB
SERVER = Facts(url="http://127.0.0.1:8000", pools=(pool(),), weights_bytes=6 * GIB, server_pids=(100, 101))


def lines(*devices: Device, of: Facts = SERVER) -> tuple[LedgerLine, ...]:
    """The ledger of one reading of some devices."""
    return ledger(Sample(at_seconds=1.0, devices=devices), of)


def sizes(found: tuple[LedgerLine, ...]) -> dict[str, int]:
    """Bytes by component."""
    return {line.component: line.bytes for line in found}


processes = st.lists(
    st.builds(
        Process,
        pid=st.integers(98, 106),
        used_bytes=st.none() | st.integers(0, 90 * GIB),
        name=st.none() | st.just("python3"),
    ),
    max_size=4,
).map(tuple)


@st.composite
def devices_of_a_host(draw: st.DrawFn) -> tuple[Device, ...]:
    """Any devices at all: full, empty, unreadable, with or without processes, some of them MIG slices."""
    found = []
    for index in range(draw(st.integers(0, 4))):
        total = draw(st.integers(1, 192 * GIB))
        memory = Memory(
            total_bytes=total,
            free_bytes=draw(st.integers(0, total)),
            driver_reserved_bytes=draw(st.none() | st.integers(0, min(total, GIB))),
        )
        parent = draw(st.sampled_from([None, None, "GPU-0"])) if index else None
        found.append(
            Device(
                uuid=f"GPU-{index}",
                index=0 if parent else index,
                name="any",
                memory=draw(st.sampled_from([memory, memory, None])),
                processes=draw(st.none() | processes),
                mig_parent_uuid=parent,
            )
        )
    return tuple(found)


@st.composite
def servers(draw: st.DrawFn) -> Facts:
    """Any server: with or without pools, sizes, weights and known processes."""
    pools = tuple(
        KvPool(
            engine=str(number),
            block_tokens=16,
            total_blocks=100,
            usable_blocks=99,
            usage_blocks=99,
            pool_bytes=draw(st.none() | st.integers(0, 100 * GIB)),
        )
        for number in range(draw(st.integers(0, 3)))
    )
    return Facts(
        url="http://127.0.0.1:8000",
        pools=pools,
        weights_bytes=draw(st.none() | st.integers(0, 100 * GIB)),
        server_pids=draw(st.none() | st.lists(st.integers(98, 106), max_size=4).map(tuple)),
    )


@given(devices_of_a_host(), servers())
def test_the_lines_of_every_device_add_up_to_its_used_bytes(seen: tuple[Device, ...], of: Facts) -> None:
    """Whatever runs where: each readable device's lines add up exactly, with one explicit residual."""
    # WHEN the ledger of any host is drawn up
    found = lines(*seen, of=of)
    # THEN each device that counts adds up, and no other has lines
    readable = {one.uuid: one.memory.used_bytes for one in without_mig_parents(seen) if one.memory is not None}
    added = {
        uuid: sum(line.bytes for line in own)
        for uuid, own in groupby(found, key=lambda line: line.uuid)
        if uuid is not None
    }
    residuals = [line.uuid for line in found if line.component == "unaccounted"]

    assert readable == added
    assert list(readable) == residuals
    assert {line.component for line in found if line.bytes < 0} <= {"unaccounted", "server_other"}


@given(devices_of_a_host(), servers())
def test_no_process_is_listed_twice(seen: tuple[Device, ...], of: Facts) -> None:
    """A process is the server's or another, never both: measured lines hold no more than was measured."""
    # WHEN the ledger of any host is drawn up
    found = lines(*seen, of=of)

    # THEN
    for one in without_mig_parents(seen):
        if one.memory is None:
            continue
        own = [line for line in found if line.uuid == one.uuid and line.component != "unaccounted"]
        measured = sum(line.bytes for line in own if line.component != "driver_reserved")
        listed = sum(each.used_bytes or 0 for each in one.processes or ())
        parts = {"kv_pool", "weights"} & {line.component for line in own}
        server = "server_other" in {line.component for line in own}
        assert measured == listed or (parts and not server)


def test_every_line_of_a_server_alone() -> None:
    """Driver, pool, weights, the rest of the server's process, and nothing unaccounted for."""
    # GIVEN a server with 1 GiB beside its pool and weights
    own = POOL_BYTES + 7 * GIB
    actual = lines(device(used_bytes=own + 464 * MIB, processes=(process(100, own),)))
    # THEN
    expected = (
        LedgerLine(gpu=0, uuid="GPU-0", component="driver_reserved", bytes=464 * MIB, source="measured"),
        LedgerLine(
            gpu=0,
            uuid="GPU-0",
            component="kv_pool",
            bytes=POOL_BYTES,
            source="reported",
            detail="the engine's kv_cache_memory_bytes",
        ),
        LedgerLine(
            gpu=0,
            uuid="GPU-0",
            component="weights",
            bytes=6 * GIB,
            source="computed",
            detail="size of the checkpoint",
        ),
        LedgerLine(
            gpu=0,
            uuid="GPU-0",
            component="server_other",
            bytes=1 * GIB,
            source="computed",
            detail="context, activations, graphs, allocator cache of pid 100",
        ),
        LedgerLine(
            gpu=0,
            uuid="GPU-0",
            component="unaccounted",
            bytes=0,
            source="computed",
            detail="no process that NVML lists",
        ),
    )

    assert expected == actual


@pytest.mark.parametrize(
    ("facts", "detail"),
    [
        (replace(SERVER, pools=()), "KV pool, context, activations, graphs, allocator cache of pid 100"),
        (replace(SERVER, weights_bytes=None), "weights, context, activations, graphs, allocator cache of pid 100"),
        (replace(SERVER, pools=(), weights_bytes=None), "all of pid 100"),
    ],
    ids=["no pool", "no weights", "neither"],
)
def test_what_is_not_told_apart_is_named_in_the_rest(facts: Facts, detail: str) -> None:
    """A pool or weights of unknown size are among the server's other bytes, and the line says so."""
    # GIVEN
    found = lines(device(used_bytes=20 * GIB, processes=(process(100, 19 * GIB),)), of=facts)

    # THEN
    assert [detail] == [line.detail for line in found if line.component == "server_other"]


def test_another_process_has_its_own_line() -> None:
    """What is not the server's stands under its own name and pid."""
    # GIVEN a training job beside the server
    found = lines(device(used_bytes=23 * GIB, processes=(process(100, 18 * GIB), process(7, 3 * GIB, "train.py"))))

    # THEN
    (other,) = [line for line in found if line.component == "other_process"]
    assert (3 * GIB, "measured", "train.py 7") == (other.bytes, other.source, other.detail)


def test_bytes_of_no_process_are_unaccounted() -> None:
    """A zombie's bytes are in no line but the residual."""
    # GIVEN 2 GiB that no process holds
    found = lines(device(used_bytes=20 * GIB + 464 * MIB, processes=(process(100, 18 * GIB),)))

    # THEN
    assert 2 * GIB == sizes(found)["unaccounted"]


def test_a_claim_that_exceeds_the_measured_bytes_is_shown_as_negative() -> None:
    """Weights of a larger checkpoint than what was loaded are not hidden: the residual is negative."""
    # GIVEN a process of 10 GiB whose parts are said to be 18 GiB
    found = lines(device(used_bytes=11 * GIB, processes=(process(100, 10 * GIB),)))

    # THEN
    assert 10 * GIB - POOL_BYTES - 6 * GIB == sizes(found)["server_other"] < 0


def test_processes_that_exceed_the_device_are_shown_as_negative() -> None:
    """Managed memory can make processes larger than the device: the residual says so."""
    # GIVEN processes of 26 GiB on 20 GiB used
    found = lines(device(used_bytes=20 * GIB, processes=(process(100, 20 * GIB), process(7, 6 * GIB))))

    # THEN
    assert -6 * GIB - 464 * MIB == sizes(found)["unaccounted"]


def test_ranks_of_tensor_parallel_share_the_weights() -> None:
    """Two GPUs: each has a pool of its own and half of the weights."""
    # GIVEN two ranks of one engine
    own = POOL_BYTES + 4 * GIB
    pair = (
        device(0, used_bytes=own + 464 * MIB, processes=(process(100, own),)),
        device(1, used_bytes=own + 464 * MIB, processes=(process(101, own),)),
    )
    found = lines(*pair)

    # THEN
    for index in (0, 1):
        own_lines = tuple(line for line in found if line.gpu == index)
        assert (POOL_BYTES, 3 * GIB, GIB, 0) == tuple(
            sizes(own_lines)[name] for name in ("kv_pool", "weights", "server_other", "unaccounted")
        )


def test_engines_of_data_parallel_have_the_weights_each() -> None:
    """Two engines on two GPUs: each holds a whole copy."""
    # GIVEN two engines
    own = POOL_BYTES + 7 * GIB
    pair = (
        device(0, used_bytes=own + 464 * MIB, processes=(process(100, own),)),
        device(1, used_bytes=own + 464 * MIB, processes=(process(101, own),)),
    )
    found = lines(*pair, of=replace(SERVER, pools=(pool("0"), pool("1"))))

    # THEN
    assert [6 * GIB, 6 * GIB] == [line.bytes for line in found if line.component == "weights"]


def test_a_server_of_unknown_size_is_not_mistaken_for_its_neighbour() -> None:
    """Where the driver tells another process's bytes and not the server's, the other one stays another."""
    # GIVEN the server without a size and a job of 3 GiB
    found = lines(device(used_bytes=23 * GIB, processes=(process(100, None), process(7, 3 * GIB, "train.py"))))

    # THEN pool and weights are reported, the job is its own, and the rest says that it is not told apart
    assert {"driver_reserved", "kv_pool", "weights", "other_process", "unaccounted"} == set(sizes(found))
    assert 3 * GIB == sizes(found)["other_process"]
    assert "the server's own memory is not told apart" == found[-1].detail


@pytest.mark.parametrize("pids", [None, (1, 2)], ids=["not known", "of another namespace"])
def test_a_lone_process_is_taken_for_the_server(pids: tuple[int, ...] | None) -> None:
    """A container sees host pids: the one process on the one device is the server's, as in baseline.foreign_memory."""
    # GIVEN one process that cannot be matched
    found = lines(
        device(used_bytes=20 * GIB, processes=(process(4711, 19 * GIB),)), of=replace(SERVER, server_pids=pids)
    )

    # THEN
    assert 19 * GIB - POOL_BYTES - 6 * GIB == sizes(found)["server_other"]
    assert "other_process" not in sizes(found)


@pytest.mark.parametrize("pids", [None, (1, 2)], ids=["not known", "of another namespace"])
def test_which_of_several_processes_is_the_server_is_not_guessed(pids: tuple[int, ...] | None) -> None:
    """Two processes of which one must be the server: neither is called another's, and nothing is counted twice."""
    # GIVEN a server and a job that cannot be told apart
    both = (process(4711, 18 * GIB), process(4712, 2 * GIB))
    found = lines(device(used_bytes=20 * GIB + 464 * MIB, processes=both), of=replace(SERVER, server_pids=pids))

    # THEN
    assert ["driver_reserved", "process", "process", "unaccounted"] == [line.component for line in found]
    assert 0 == sizes(found)["unaccounted"]


def test_without_process_lists_the_servers_parts_are_still_told() -> None:
    """A container without process lists shows pool and weights on its one device, the rest in the residual."""
    # GIVEN no list
    found = lines(device(used_bytes=20 * GIB), of=replace(SERVER, server_pids=None))

    # THEN
    assert 20 * GIB - 464 * MIB - POOL_BYTES - 6 * GIB == sizes(found)["unaccounted"]


def test_which_of_several_gpus_is_the_servers_is_not_guessed() -> None:
    """Two GPUs without process lists, and a server of unknown processes: neither is said to hold its pool."""
    # GIVEN
    found = lines(device(0, used_bytes=20 * GIB), device(1, used_bytes=GIB), of=replace(SERVER, server_pids=None))

    # THEN
    assert ["driver_reserved", "unaccounted"] * 2 == [line.component for line in found]


def test_a_process_of_no_bytes_takes_none() -> None:
    """A server that has only begun, and an idle helper without a name: 0 bytes are 0 bytes."""
    # GIVEN
    found = lines(
        device(used_bytes=464 * MIB, processes=(process(100, 0), process(7, 0, None))),
        of=replace(SERVER, pools=(), weights_bytes=None),
    )

    # THEN
    assert [
        ("driver_reserved", 464 * MIB, ""),
        ("server_other", 0, "all of pid 100"),
        ("other_process", 0, "process 7"),
        ("unaccounted", 0, "no process that NVML lists"),
    ] == [(line.component, line.bytes, line.detail) for line in found]


def test_a_pool_computed_from_the_config_says_so() -> None:
    """Llama-3.1-8B: 131,072 bytes a token, 16 tokens a block; the engine tells 1,000 blocks and no bytes."""
    # GIVEN
    shape = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    of = replace(
        SERVER,
        pools=(pool(usable_blocks=999, pool_bytes=None, capacity_tokens=None, max_concurrency=None),),
        model_config=json.dumps({"model_type": "llama", **shape}),
        max_model_len_tokens=8192,
        tensor_parallel=1,
    )

    # WHEN
    (whole,) = [
        line for line in lines(device(processes=(process(100, 18 * GIB),)), of=of) if line.component == "kv_pool"
    ]

    # THEN
    assert (1000 * 16 * 131_072, "computed", "its blocks, each as large as the model's config makes it") == (
        whole.bytes,
        whole.source,
        whole.detail,
    )


def test_an_engine_that_tells_no_usage_hides_no_other() -> None:
    """Two engines, data parallel, no GPU in sight: the one that tells is shown, whatever the one before it does."""
    # GIVEN
    of = replace(SERVER, pools=(pool("0"), pool("1")))
    sample = Sample(at_seconds=1.0, engines=(engine(usage=None), engine(label="1", usage=0.5)))

    # THEN of 6,144 usable blocks of 2 MiB half are held
    assert [("kv_held", 3072 * 2 * MIB, "engine 1"), ("kv_free", POOL_BYTES - 3072 * 2 * MIB)] == [
        (line.component, line.bytes, line.detail) if line.component == "kv_held" else (line.component, line.bytes)
        for line in ledger(sample, of)
    ]


def test_a_gpu_without_the_server_has_none_of_its_parts() -> None:
    """Pool and weights are on the server's device, not on every device of the host."""
    # GIVEN the server on GPU 0 and a job on GPU 1
    found = lines(
        device(0, used_bytes=20 * GIB, processes=(process(100, 19 * GIB),)),
        device(1, used_bytes=8 * GIB, processes=(process(7, 7 * GIB),)),
    )

    # THEN
    assert ["driver_reserved", "other_process", "unaccounted"] == [line.component for line in found if line.gpu == 1]


def test_without_a_device_the_engine_alone_is_told() -> None:
    """No GPU in sight: what requests hold of each pool and what is free of it, as the engine reports."""
    # GIVEN a pool of which 1,536 of 6,144 blocks are held
    found = ledger(Sample(at_seconds=1.0, engines=(engine(usage=0.25),)), SERVER)
    # THEN the null block counts as free: requests do not hold it
    held = 1536 * 2 * MIB
    kept = "engine 0: empty or kept prefixes, which the engine does not count apart"
    expected = (
        LedgerLine(gpu=None, component="kv_held", bytes=held, source="reported", detail="engine 0"),
        LedgerLine(gpu=None, component="kv_free", bytes=POOL_BYTES - held, source="reported", detail=kept),
    )

    assert expected == found


@pytest.mark.parametrize(
    ("sample", "of"),
    [
        (None, SERVER),
        (Sample(at_seconds=1.0), SERVER),
        (Sample(at_seconds=1.0, engines=(engine(usage=None),)), SERVER),
        (Sample(at_seconds=1.0, engines=(engine(label="7"),)), SERVER),
        (Sample(at_seconds=1.0, engines=(engine(),)), replace(SERVER, pools=(pool(pool_bytes=None),))),
        (Sample(at_seconds=1.0, devices=()), Facts()),
    ],
    ids=["nothing", "empty", "no usage", "another engine", "no bytes", "no device"],
)
def test_what_was_not_told_has_no_line(sample: Sample | None, of: Facts) -> None:
    """Without usage or bytes no line is made up."""
    # THEN
    assert () == ledger(sample, of)


def test_a_device_that_does_not_tell_its_memory_gives_way_to_the_engine() -> None:
    """Unified memory has no lines of its own: what the engine tells stands instead."""
    # GIVEN such a device and an idle engine
    sample = Sample(at_seconds=1.0, devices=(device(used_bytes=None),), engines=(engine(),))

    # THEN
    assert {"kv_held": 0, "kv_free": POOL_BYTES} == sizes(ledger(sample, SERVER))


@pytest.mark.parametrize("name", WORLDS)
def test_the_ledger_of_a_whole_run_adds_up(name: str) -> None:
    """The newest reading of every world's devices is accounted for to the byte."""
    # GIVEN a run
    world = WORLDS[name]
    diagnosis = judged(world)
    devices = {line.uuid for line in diagnosis.ledger if line.uuid is not None}

    # THEN the residual of a device whose server is told apart is what no process holds
    told = world.nvml is None and world.memory_told
    assert (set() if not told else {f"GPU-{index}" for index in range(world.gpus)}) == devices
    if told and world.processes_told and world.server_seen:
        (unaccounted, *_) = [line.bytes for line in diagnosis.ledger if line.component == "unaccounted"]
        hidden = sum(other.used_bytes is None for others in world.foreign.values() for other in others)
        assert hidden or world.zombie_bytes == unaccounted


def test_a_newer_reading_without_process_lists_does_not_blur_the_ledger() -> None:
    """Process lists come with every fifth reading: the ledger of a run still tells the server apart."""
    # GIVEN a healthy run, whose last readings of the devices may have no list
    found = judged(World()).ledger

    # THEN
    assert "server_other" in {line.component for line in found}
    assert facts(World()).server_pids == (100,)
