from dataclasses import replace

import pytest

from kvdiag.diagnosis.growth.components import MemoryComponent as Part
from kvdiag.diagnosis.growth.host_caches import SizeLimit
from kvdiag.diagnosis.growth.soak_cycles import Shape, Soaked
from kvdiag.diagnosis.growth.soak_memory import (
    SoakedComponent,
    evidence,
    finding,
    follows_dose,
    verdict,
    weightier,
    worst,
)
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Finding, Status
from tests.builders.values import GIB, MIB

SOAKED = Soaked(
    shape="leak",
    load_cycles=12,
    idle_cycles=11,
    requests=48,
    per_cycle=8.0 * MIB,
    per_idle_cycle=1.0 * MIB,
    per_request=2.0 * MIB,
    gain=96.0 * MIB,
    first_touch=32.0 * MIB,
    trend_p=0.001,
    load_p=0.002,
    dose_p=None,
    bins=5,
    visible_per_cycle=4.0 * MIB,
)


def component(kind: str, shape: Shape = "leak", **changes: object) -> SoakedComponent:
    """A component of a process called so, which leaks 2 MiB a request."""
    soaked = replace(SOAKED, shape=shape, **changes)  # type: ignore[arg-type]
    return SoakedComponent(kind=Part(kind), who="a 7", soaked=soaked)


def said(kind: str, shape: Shape = "leak", **changes: object) -> tuple[Status, str]:
    """Status and sentence."""
    return verdict(component(kind, shape, **changes), DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("shape", "statuses"),
    [
        # the components as below
        ("leak", "fault suspect fault fault fault fault unknown fault"),
        ("content", "suspect suspect suspect suspect suspect suspect unknown suspect"),
        ("background", "suspect suspect suspect suspect unknown unknown ok unknown"),
        ("ended", "ok ok ok ok ok ok ok ok"),
        ("unsteady", "unknown unknown unknown unknown unknown unknown ok unknown"),
        ("flat", "ok ok ok ok ok ok ok ok"),
    ],
)
def test_status_is_by_what_grew_and_how(shape: Shape, statuses: str) -> None:
    """Others' memory is never this server's fault, a cache may reach its mark, and what idles as well may be theirs."""
    kinds: tuple[str, ...] = (
        "torch_live", "torch_unused", "outside_torch", "server", "kv_held_idle", "device", "others", "host_anonymous",
    )  # fmt: skip
    assert statuses.split() == [said(kind, shape)[0] for kind in kinds]


@pytest.mark.parametrize(
    ("grown", "reported", "statuses"),
    [
        pytest.param(300 * MIB, True, "suspect ok unknown ok flat", id="within a limit that is set"),
        pytest.param(300 * MIB, False, "suspect unknown unknown unknown flat", id="within a default"),
        pytest.param(3 * GIB, True, "fault suspect unknown unknown flat", id="beyond it"),
    ],
)
def test_a_hosts_cache_may_grow_to_its_limit(grown: int, reported: bool, statuses: str) -> None:
    """A prompt cache takes new content alone: what repeated content leaves behind stays in doubt."""
    caches = SizeLimit(limit_bytes=2 * GIB, names="the prompt cache", reported=reported)
    shapes: tuple[Shape, ...] = ("leak", "content", "background", "unsteady", "flat")
    found = [replace(component("host_anonymous", shape), caches=caches, grown_bytes=grown) for shape in shapes]
    assert statuses.replace("flat", "ok").split() == [verdict(one, DEFAULT_LIMITS)[0] for one in found]


@pytest.mark.parametrize(("bins", "status"), [(4, "suspect"), (5, "fault")])
def test_hosts_leak_is_certain_after_five_bins(bins: int, status: str) -> None:
    """A soak of fewer leaves room for a garbage collector."""
    actual = said("host_anonymous", bins=bins)
    assert (status, status == "suspect") == (actual[0], "garbage" in actual[1])
    assert "garbage" not in said("torch_unused")[1]


@pytest.mark.parametrize(("p_value", "follows"), [(None, False), (0.05, False), (0.049, True)])
def test_larger_doses_that_leave_more_are_told(p_value: float | None, follows: bool) -> None:
    """At a p-value below 0.05."""
    assert follows == follows_dose(component("server", dose_p=p_value), DEFAULT_LIMITS)


def test_amount_is_in_the_components_unit() -> None:
    """Blocks of the pool, bytes of all else."""
    assert ("0.12 blocks", "2.00 KiB") == (Part.KV_HELD_IDLE.amount(0.123), Part.HOST_ANONYMOUS.amount(2048.0))


def test_worst_is_the_gravest_then_the_fastest() -> None:
    """A fault before a suspect before what is not known; what is not flat before what is; then by its growth."""
    order = [
        component("server", per_cycle=3.0),
        component("server", per_cycle=2.0),
        component("torch_unused", per_cycle=9.0),
        component("server", "unsteady", per_cycle=9.0),
        component("server", "ended", per_cycle=1.0),
        component("server", "flat", per_cycle=9.0),
    ]

    for place in range(len(order)):
        assert order[place] is worst(order[: place - 1 if place else None : -1], DEFAULT_LIMITS)
    assert worst([], DEFAULT_LIMITS) is None


def test_finding_is_that_of_the_worst() -> None:
    """With its evidence; where nothing was read there is none."""
    actual = finding("leak.host", [component("host_anonymous", "flat"), component("host_anonymous")], DEFAULT_LIMITS)

    status, summary = said("host_anonymous")
    shown = evidence(component("host_anonymous"))
    assert actual == Finding(id="leak.host", status=status, summary=summary, evidence=shown, holder="a 7")
    assert finding("leak.host", [], DEFAULT_LIMITS) is None


@pytest.mark.parametrize(
    ("by_soak", "otherwise", "soak_counts"),
    [
        ("ok", "fault", True),
        ("unknown", "ok", True),
        ("unknown", "unknown", True),
        ("unknown", "suspect", False),
        ("unknown", "fault", False),
        ("suspect", "fault", True),
    ],
)
def test_soak_goes_before_what_was_watched(by_soak: Status, otherwise: Status, soak_counts: bool) -> None:
    """The soak's status counts, unless it is unknown and the other is a suspect or a fault."""
    soak, other = (Finding(id="leak.host", status=status, summary="") for status in (by_soak, otherwise))

    assert (soak if soak_counts else other) is weightier(soak, other)
    assert other is weightier(None, other)


@pytest.mark.parametrize(
    ("kind", "source", "unit"),
    [
        ("torch_live", "torch", "bytes"),
        ("torch_unused", "torch", "bytes"),
        ("outside_torch", "torch", "bytes"),
        ("kv_held_idle", "engine", "blocks"),
        ("host_anonymous", "host", "bytes"),
        ("server", "nvml", "bytes"),
        ("device", "nvml", "bytes"),
        ("others", "nvml", "bytes"),
    ],
)
def test_evidence_has_every_figure_with_its_unit(kind: str, source: str, unit: str) -> None:
    """From whom the component is read, in its own unit."""
    actual = [(one.name, one.value, one.unit, one.source) for one in evidence(component(kind, dose_p=0.003, bins=9))]
    assert actual == [
        ("holder", "a 7", "holder", source),
        ("growth_per_load_cycle", 8.0 * MIB, unit, source),
        ("growth_per_idle_cycle", 1.0 * MIB, unit, source),
        ("growth_per_request", 2.0 * MIB, unit, source),
        ("warmup_growth", 32.0 * MIB, unit, source),
        ("judged_load_cycles", 12, "cycles", "kvdiag"),
        ("judged_idle_cycles", 11, "cycles", "kvdiag"),
        ("p_trend", 0.001, "p-value", "computed"),
        ("p_load", 0.002, "p-value", "computed"),
        ("p_dose", 0.003, "p-value", "computed"),
        ("detection_limit", 4.0 * MIB, f"{unit} per cycle", "computed"),
        ("detection_limit_per_request", 1.0 * MIB, f"{unit} per request", "computed"),
    ]
