"""GPUs and drivers that are lost, hang or do not start: named, asked ever more rarely, read again when back."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvdiag.sources.nvml import LAST_RETRY_SECONDS, NvmlSource
from kvdiag.sources.worker_thread import ReadTimeout
from tests.stand_ins.nvml.nvml_client import Client
from tests.stand_ins.nvml.stand_in import Delay, Failure, StandIn, State
from tests.unit.sources.nvml.nvml_devices import EMPTY, FULL, GIB, MEMORY, gap, seen, unread

HANG_SECONDS = 5.0
LONG_SECONDS = 30.0


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize(
    ("code", "text"), [(15, "GPU is lost"), (16, "GPU requires restart"), (999, "Unknown Error")], ids=str
)
def test_lost_gpu_comes_back(stand_in: StandIn, client: Client, code: int, text: str) -> None:
    """A GPU lost in mid-run stays without memory, leaves the other alone, and is read again once it is back."""
    well = State(gpus=(FULL, EMPTY))
    stand_in.show(well)
    before = client.read()

    stand_in.show(replace(well, failures=(Failure("nvmlDeviceGet*", code, uuid=FULL.uuid),)))
    lost = client.read()
    client.wait(LAST_RETRY_SECONDS)
    still_lost = client.read()
    stand_in.show(well)
    client.wait(LAST_RETRY_SECONDS)
    actual = (before, lost, still_lost, client.read())

    whole = ((seen(FULL, 0), seen(EMPTY, 1)), ())
    torn = ((unread(FULL, 0), seen(EMPTY, 1)), (gap("failed", "GPU-full", text, "Xid"),))
    assert (whole, torn, torn, whole) == actual


@pytest.mark.nvml_stand_in
def test_lost_gpu_is_left_alone_for_a_while(stand_in: StandIn, client: Client) -> None:
    """A lost GPU is not asked again at once: polling what fell off the bus holds the driver's lock for all."""
    well = State(gpus=(FULL, EMPTY))
    stand_in.show(replace(well, failures=(Failure(MEMORY, 15, uuid=FULL.uuid),)))
    lost = client.read()
    stand_in.show(well)
    assert lost == client.read()


@pytest.mark.nvml_stand_in
def test_gpu_lost_before_it_has_a_name(stand_in: StandIn, client: Client) -> None:
    """A GPU whose uuid was never reported is a gap that names its index, until the uuid is known."""
    well = State(gpus=(FULL, EMPTY))
    stand_in.show(replace(well, failures=(Failure("nvmlDeviceGetHandleByIndex*", 15, uuid=EMPTY.uuid),)))

    nameless = client.read()
    stand_in.show(well)
    client.wait(LAST_RETRY_SECONDS)
    actual = (nameless, client.read())

    expected = (((seen(FULL, 0),), (gap("failed", "GPU 1", "GPU is lost"),)), ((seen(FULL, 0), seen(EMPTY, 1)), ()))
    assert expected == actual


@pytest.mark.nvml_stand_in
def test_hang_is_noticed_and_gets_over(stand_in: StandIn, client: Client) -> None:
    """A driver call that hangs times out at each question, and memory is read again once the call has returned."""
    stand_in.show(State(gpus=(FULL,)))
    before = client.ask(LONG_SECONDS)

    stand_in.show(State(gpus=(FULL,), delays=(Delay(MEMORY, HANG_SECONDS),)))
    for _ in range(2):
        with pytest.raises(ReadTimeout):
            client.ask(0.1)
    fuller = replace(FULL, free_bytes=GIB)
    stand_in.show(State(gpus=(fuller,)))
    assert (((seen(FULL, 0),), ()), ((seen(fuller, 0),), ())) == (before, client.ask(LONG_SECONDS))


@pytest.mark.nvml_stand_in
def test_hang_does_not_keep_the_process(stand_in: StandIn) -> None:
    """A process with a hung driver call closes its source and ends, without waiting for either."""
    stand_in.show(State(gpus=(FULL,), delays=(Delay(MEMORY, 1000 * LONG_SECONDS),)))
    with Client(stand_in.environment()) as client:
        with pytest.raises(ReadTimeout):
            client.ask(0.1)
        client.close()
        actual = client.end()
    assert 0 == actual


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (4, "/dev/nvidia*"),
        (9, "kernel module is not loaded"),
        (18, "driver was replaced"),
        (20, "Insufficient Memory"),
        (999, "Unknown Error"),
    ],
    ids=str,
)
def test_driver_that_does_not_start(stand_in: StandIn, client: Client, code: int, reason: str) -> None:
    """A driver that fails at the start is one gap that says what to do, and heals by itself."""
    stand_in.show(State(gpus=(FULL,), failures=(Failure("nvmlInit*", code),)))

    down = client.read()
    stand_in.show(State(gpus=(FULL,)))
    still_down = client.read()
    client.wait(LAST_RETRY_SECONDS)
    actual = (down, still_down, client.read())

    nothing = (None, (gap("failed", reason),))
    assert (nothing, nothing, ((seen(FULL, 0),), ())) == actual


@pytest.mark.nvml_stand_in
@pytest.mark.parametrize("function", ["nvml*", MEMORY])
def test_driver_lost_in_mid_run(stand_in: StandIn, client: Client, function: str) -> None:
    """A driver that is replaced under a running source takes all devices with it, until its library fits again."""
    stand_in.show(State(gpus=(FULL, EMPTY)))
    before = client.read()

    stand_in.show(State(gpus=(FULL, EMPTY), failures=(Failure(function, 18),)))
    lost = client.read()
    stand_in.show(State(gpus=(FULL, EMPTY)))
    client.wait(LAST_RETRY_SECONDS)
    actual = (before, lost, client.read())

    whole = ((seen(FULL, 0), seen(EMPTY, 1)), ())
    assert (whole, (None, (gap("failed", "driver was replaced"),)), whole) == actual


@pytest.mark.nvml_stand_in
def test_reloaded_driver_costs_no_reading(stand_in: StandIn, client: Client) -> None:
    """A reloaded driver is initialised again within the same read, and its GPUs are identified again."""
    stand_in.show(State(gpus=(FULL, EMPTY)))
    client.read()
    stand_in.show(State(gpus=(EMPTY,), generation=2))
    assert ((seen(EMPTY, 0),), ()) == client.read()


@pytest.mark.nvml_stand_in
def test_closed_source_starts_anew(stand_in: StandIn, client: Client) -> None:
    """After close NVML is started again by the next read."""
    stand_in.show(State(gpus=(FULL,)))
    client.read()
    client.close()
    stand_in.show(State(gpus=(FULL,), failures=(Failure("nvmlInit*", 9),)))
    assert (None, (gap("failed", "kernel module is not loaded"),)) == client.read()


@pytest.mark.parametrize(
    ("works_at", "seconds", "expected"),
    [((), 250, [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]), ((7, 8), 13, [0, 1, 3, 7, 9, 10, 12])],
    ids=["pauses double up to a minute", "after an outage they begin anew"],
)
def test_lost_driver_is_asked_ever_more_rarely(works_at: tuple[int, ...], seconds: int, expected: list[int]) -> None:
    """NVML that does not start is tried again after 1 s, then after longer pauses."""
    second = 0
    tried: list[int] = []

    class Error(Exception):
        value = 9

    def init() -> None:
        tried.append(second)
        count()

    def count() -> int:
        if second not in works_at:
            raise Error
        return 0

    library = SimpleNamespace(NVMLError=Error, nvmlInit=init, nvmlDeviceGetCount=count)
    source = NvmlSource(library, clock=lambda: float(second))
    for second in range(seconds):  # noqa: B007 - read by the clock and the library
        source.read(processes=False)
    assert expected == tried
