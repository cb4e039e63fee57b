"""leak.device_torch and leak.device_non_torch by a soak alone: what its components say, and which of the two it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.growth.attribution import UNDECIDED
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_device import judge
from kvdiag.model import Finding
from tests.builders.soak_timeline import NONE, Seen, after_cycles, after_requests, facts_of, soak
from tests.builders.values import MIB

TORCH, NON_TORCH = "leak.device_torch", "leak.device_non_torch"
LEAK = after_requests(MIB)
NO_CYCLES = "5 equal cycles with device readings after each are needed"


def told(seen: Seen, engine_name: str | None = "vllm") -> tuple[Finding, Finding]:
    """Both findings, torch's first."""
    known = replace(facts_of(), engine_name=engine_name)
    found = {one.id: one for one in judge(soak(seen), known, DEFAULT_LIMITS)}
    return found[TORCH], found[NON_TORCH]


@pytest.mark.parametrize(
    ("seen", "torch", "beside"),
    [
        (
            Seen(live=LEAK, beside=NONE),
            ("fault", "allocated memory grows"),
            ("ok", "memory outside torch is flat"),
        ),
        (
            Seen(live=NONE, beside=LEAK),
            ("ok", "allocated memory is flat"),
            ("fault", "memory outside torch grows"),
        ),
        (Seen(live=NONE, beside=None), ("ok", "allocated memory is flat"), ("unknown", NO_CYCLES)),
        (Seen(live=LEAK, server=LEAK), ("fault", "allocated memory grows"), ("unknown", NO_CYCLES)),
    ],
    ids=["live", "beside", "flat, rest not told", "live, rest not told"],
)
def test_where_agents_tell_each_has_its_own(seen: Seen, torch: tuple[str, str], beside: tuple[str, str]) -> None:
    """What NVML shows of the whole process decides nothing there; what is not told is left to the minute's cycles."""
    for (status, words), actual in zip((torch, beside), told(seen), strict=True):
        assert words in actual.summary
        assert status == actual.status


@pytest.mark.parametrize("server_told", [True, False], ids=["the server's bytes", "the device's"])
def test_what_nvml_alone_sees_stand_still_is_flat_in_both(server_told: bool) -> None:
    """Whatever is flat is flat in torch, too: one sentence for both, with the same figures."""
    torch, beside = told(Seen(server_told=server_told))

    assert ("ok", "ok") == (torch.status, beside.status)
    assert "is flat over 19 load cycles" in torch.summary
    assert torch == replace(beside, id=TORCH)


@pytest.mark.parametrize(
    ("engine_name", "likely"), [("vllm", TORCH), (None, NON_TORCH)], ids=["an engine of torch's", "another"]
)
@pytest.mark.parametrize("server_told", [True, False], ids=["the server's bytes", "the device's"])
def test_what_nvml_alone_sees_grow_is_called_what_it_mostly_is(
    engine_name: str | None, likely: str, server_told: bool
) -> None:
    """The other one is unknown, and both say what would decide."""
    found = told(Seen(server=LEAK, server_told=server_told), engine_name)

    called, other = found if likely == TORCH else found[::-1]
    assert ("fault", True) == (called.status, called.summary.endswith(f"; {UNDECIDED}"))
    assert "grows 1.00 MiB with each request and is not released" in called.summary
    assert ("unknown", f"{UNDECIDED}", ()) == (other.status, other.summary, other.evidence)


def test_growth_that_idle_cycles_show_as_well_is_not_the_requests() -> None:
    """Of the server's own bytes it is suspect, of a device whose are not told unknown."""
    found = [told(Seen(server=after_cycles(4 * MIB), server_told=one))[0].status for one in (True, False)]
    assert ["suspect", "unknown"] == found
