from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.sim.gpu import GIB, MIB, Block, CachingAllocator, DeviceFullError, Gpu, OutOfMemoryError, size_text


def gpu() -> Gpu:
    """A device of 1 GiB, of which 1000 MiB can be had."""
    return Gpu(uuid="GPU-0", name="test", total_bytes=GIB, driver_reserved_bytes=24 * MIB)


def allocator(device: Gpu, *, expandable: bool = False) -> CachingAllocator:
    """The allocator of a server on this device."""
    return CachingAllocator(device, device.join(7, "server"), expandable_segments=expandable)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.one_of(st.integers(1, 200 * MIB), st.integers(1, 2 * MIB), st.just("free"), st.just("empty_cache")),
        max_size=60,
    ),
    st.booleans(),
)
def test_bytes_are_conserved(actions: list[int | str], expandable: bool) -> None:
    """Device, process and allocator agree on every byte after any sequence of allocations, frees and caching."""
    # A device of 1 GiB
    device = gpu()
    subject = allocator(device, expandable=expandable)
    live: list[Block] = []
    for action in actions:
        if isinstance(action, int):
            try:
                live.append(subject.allocate(action))
            except OutOfMemoryError:
                assert action > device.free_bytes
        elif action == "free" and live:
            subject.free(live.pop(len(live) // 2))
        elif action == "empty_cache":
            subject.empty_cache()
        assert sum(block.size_bytes for block in live) == subject.allocated_bytes
        assert subject.allocated_bytes <= subject.reserved_bytes == subject.process.used_bytes
        assert device.usable_bytes == device.free_bytes + subject.process.used_bytes
    for block in live:
        subject.free(block)
    subject.empty_cache()
    assert 0 == subject.process.used_bytes


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (1 * MIB, 1 * MIB, 2 * MIB),
        (1 * MIB + 1, 1 * MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (33 * MIB, 34 * MIB, 34 * MIB),
        (35 * MIB - 1, 36 * MIB, 36 * MIB),
    ],
)
def test_sizes_are_rounded_as_torch_rounds_them(asked: int, allocated: int, reserved: int) -> None:
    """Small tensors take segments of 2 MiB, middling ones 20 MiB, large ones multiples of 2 MiB."""
    subject = allocator(gpu())
    subject.allocate(asked)
    assert (allocated, reserved) == (subject.allocated_bytes, subject.reserved_bytes)


def test_freed_memory_stays_cached_and_is_used_again() -> None:
    """Freeing returns nothing to the device; the next allocation takes the hole, and a smaller one splits it."""
    device = gpu()
    subject = allocator(device)
    subject.free(subject.allocate(100 * MIB))
    before = device.free_bytes
    first, second = subject.allocate(60 * MIB), subject.allocate(40 * MIB)
    assert before == device.free_bytes
    assert first.segment is second.segment


def test_neighbouring_holes_join() -> None:
    """Three adjacent freed blocks are one hole again, freed in any order."""
    subject = allocator(gpu())
    subject.free(subject.allocate(90 * MIB))
    parts = [subject.allocate(30 * MIB) for _ in range(3)]
    for number in (0, 2, 1):
        subject.free(parts[number])
    subject.allocate(90 * MIB)
    assert 90 * MIB == subject.reserved_bytes


def test_the_smallest_hole_that_fits_is_taken() -> None:
    """Best fit: a small tensor does not eat into the large hole while a smaller one is there."""
    subject = allocator(gpu())
    large, small = subject.allocate(200 * MIB), subject.allocate(50 * MIB)
    subject.free(large)
    subject.free(small)
    assert small.segment is subject.allocate(40 * MIB).segment


def test_cached_segments_go_back_before_memory_is_out() -> None:
    """When the device is full, whole free segments are returned to it and the allocation is tried once more."""
    # A cached segment that is too small for the request, and too little free memory besides
    subject = allocator(gpu())
    subject.free(subject.allocate(600 * MIB))
    subject.allocate(800 * MIB)
    assert 800 * MIB == subject.reserved_bytes


def test_holes_do_not_add_up(golden: Callable[[str, str], None]) -> None:
    """A comb of holes cannot hold one large tensor although enough is free in sum: fragmentation, and torch says so."""
    # 600 MiB cut into ten holes of 58 MiB by tensors of 2 MiB, and another program's 300 MiB
    device = gpu()
    device.take(device.join(99, "other"), 300 * MIB)
    subject = allocator(device)
    subject.free(subject.allocate(600 * MIB))
    holes = []
    for _ in range(10):
        holes.append(subject.allocate(58 * MIB))
        subject.allocate(2 * MIB)
    for hole in holes:
        subject.free(hole)

    with pytest.raises(OutOfMemoryError) as raised:
        subject.allocate(150 * MIB)

    assert 150 * MIB < device.free_bytes + subject.reserved_bytes - subject.allocated_bytes
    golden("sim/out_of_memory.txt", f"{raised.value}\n")


def test_the_driver_gives_whole_pages_of_what_is_free() -> None:
    """Memory outside torch comes in pages of 2 MiB, and not beyond what is free."""
    device = gpu()
    process = device.join(7, "server")
    assert 2 * MIB == device.take(process, 1)
    with pytest.raises(DeviceFullError):
        device.take(process, 999 * MIB)
    device.give_back(process, 2 * MIB)
    assert (1000 * MIB, ()) == (device.free_bytes, device.processes)


def test_nothing_is_returned_twice() -> None:
    """Giving back more than was taken, or freeing a block twice, is an error."""
    subject = allocator(gpu())
    with pytest.raises(ValueError, match="cannot return"):
        subject.gpu.give_back(subject.process, 1)
    block = subject.allocate(1)
    subject.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        subject.free(block)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(512, "512 bytes"), (1536, "1.50 KiB"), (MIB, "1024.00 KiB"), (20 * MIB, "20.00 MiB"), (GIB * 5 // 2, "2.50 GiB")],
)
def test_sizes_are_written_as_torch_writes_them(size: int, expected: str) -> None:
    """Sizes carry two decimals and change unit only above a full 1024."""
    assert expected == size_text(size)
