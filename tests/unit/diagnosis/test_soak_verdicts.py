from __future__ import annotations

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.soak import Shape, Soaked
from kvdiag.diagnosis.soak_components import Component, Kind
from kvdiag.diagnosis.soak_verdicts import amount, evidence, finding, follows_dose, verdict, weightier, worst
from kvdiag.model import Finding, Status
from tests.builders.values import MIB

SOAKED = Soaked(
    shape="leak",
    load_cycles=12,
    idle_cycles=11,
    requests_per_cycle=4.0,
    per_cycle=8.0 * MIB,
    per_idle_cycle=1.0 * MIB,
    per_request=2.0 * MIB,
    gain=96.0 * MIB,
    first_touch=32.0 * MIB,
    trend_p=0.001,
    load_p=0.002,
    dose_p=None,
    blocks=5,
    visible_per_cycle=4.0 * MIB,
)


def component(kind: Kind, shape: Shape = "leak", **changes: object) -> Component:
    """A component of a process called so, which leaks 2 MiB a request."""
    return Component(kind=kind, who="a 7", soaked=replace(SOAKED, shape=shape, **changes))  # type: ignore[arg-type]


def said(kind: Kind, shape: Shape = "leak", **changes: object) -> tuple[Status, str]:
    """Status and sentence."""
    return verdict(component(kind, shape, **changes), DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("shape", "statuses"),
    [
        # torch_live, torch_cache, beside_torch, process, kv, device, others, host
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
    kinds: tuple[Kind, ...] = (
        "torch_live", "torch_cache", "beside_torch", "process", "kv", "device", "others", "host",
    )  # fmt: skip
    assert statuses.split() == [said(kind, shape)[0] for kind in kinds]


@pytest.mark.parametrize(
    ("kind", "shape", "sentence"),
    [
        ("process", "leak", "a 7: the server's memory grows 2.00 MiB with each request and does not return"),
        (
            "torch_live",
            "content",
            (
                "a 7: torch's live bytes grows 2.00 MiB with each request of new content and not with repeated ones: "
                "contents are kept, and their bound decides"
            ),
        ),
        (
            "beside_torch",
            "background",
            "a 7: memory beside torch grows 1.00 MiB in an idle cycle and no more under load: not caused by requests",
        ),
        (
            "host",
            "background",
            (
                "cannot tell: a 7: anonymous host memory grows 1.00 MiB in an idle cycle and no more under load: "
                "not caused by requests"
            ),
        ),
        (
            "process",
            "ended",
            (
                "a 7: the server's memory grew 128 MiB and stopped: warm-up, not a leak; "
                "4.00 MiB a cycle (1.00 MiB a request) would show"
            ),
        ),
        (
            "process",
            "unsteady",
            (
                "cannot tell: a 7: the server's memory rose 96.00 MiB over 12 load cycles, but not steadily; "
                "a longer soak would decide"
            ),
        ),
        ("others", "unsteady", "a 7: other processes' memory rose 96.00 MiB over 12 load cycles, but not steadily"),
        (
            "process",
            "flat",
            "a 7: the server's memory is flat over 12 load cycles; 4.00 MiB a cycle (1.00 MiB a request) would show",
        ),
    ],
)
def test_sentence_has_the_figures_that_count(kind: Kind, shape: Shape, sentence: str) -> None:
    """By request, by idle cycle, in all, and what would have shown."""
    assert sentence == said(kind, shape)[1]


@pytest.mark.parametrize(("blocks", "status"), [(4, "suspect"), (5, "fault")])
def test_hosts_leak_is_certain_after_five_blocks(blocks: int, status: str) -> None:
    """A soak of fewer leaves room for a collector of garbage, and says so."""
    # WHEN
    actual, sentence = said("host", blocks=blocks)

    # THEN
    assert status == actual
    assert (status == "suspect") == ("a longer soak decides" in sentence)


@pytest.mark.parametrize(("chance", "follows"), [(None, False), (0.05, False), (0.049, True)])
def test_larger_doses_that_leave_more_are_told(chance: float | None, follows: bool) -> None:
    """Where the chance of it is below one in twenty."""
    assert follows == follows_dose(component("process", dose_p=chance), DEFAULT_LIMITS)
    assert follows == ("larger doses leave more" in said("process", dose_p=chance)[1])


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("kv", 0.123, "0.12 blocks"),
        ("kv", 9.94, "9.9 blocks"),
        ("kv", 10.0, "10 blocks"),
        ("kv", 1234.5, "1,234 blocks"),
        ("host", 2048.0, "2.00 KiB"),
    ],
)
def test_amount_is_in_the_components_unit(kind: Kind, value: float, expected: str) -> None:
    """Blocks of the pool, bytes of all else; from ten on without decimals."""
    assert expected == amount(kind, value)


def test_worst_is_the_gravest_then_the_fastest() -> None:
    """A fault before a suspect before what is not known; what is not flat before what is; then by its growth."""
    # GIVEN
    order = [
        component("process", per_cycle=3.0),
        component("process", per_cycle=2.0),
        component("torch_cache", per_cycle=9.0),
        component("process", "unsteady", per_cycle=9.0),
        component("process", "ended", per_cycle=1.0),
        component("process", "flat", per_cycle=9.0),
    ]

    # THEN
    for place in range(len(order)):
        assert order[place] is worst(order[: place - 1 if place else None : -1], DEFAULT_LIMITS)
    assert worst([], DEFAULT_LIMITS) is None


def test_finding_is_that_of_the_worst() -> None:
    """With its evidence; where nothing was read there is none."""
    # WHEN
    actual = finding("leak.host", [component("host", "flat"), component("host")], DEFAULT_LIMITS)

    # THEN
    status, summary = said("host")
    assert actual == Finding(id="leak.host", status=status, summary=summary, evidence=evidence(component("host")))
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
    """It has its own controls; where it cannot tell, one that can does."""
    # GIVEN
    soak, other = (Finding(id="leak.host", status=status, summary="") for status in (by_soak, otherwise))

    # THEN
    assert (soak if soak_counts else other) is weightier(soak, other)
    assert other is weightier(None, other)


@pytest.mark.parametrize(
    ("kind", "source", "unit"),
    [
        ("torch_live", "torch", "bytes"),
        ("torch_cache", "torch", "bytes"),
        ("beside_torch", "torch", "bytes"),
        ("kv", "engine", "blocks"),
        ("host", "host", "bytes"),
        ("process", "nvml", "bytes"),
        ("device", "nvml", "bytes"),
        ("others", "nvml", "bytes"),
    ],
)
def test_evidence_has_every_figure_with_its_unit(kind: Kind, source: str, unit: str) -> None:
    """From whom the component is read, in its own unit."""
    actual = [(one.name, one.value, one.unit, one.source) for one in evidence(component(kind, dose_p=0.003, blocks=9))]
    assert actual == [
        ("holder", "a 7", "", source),
        ("growth_per_load_cycle", 8.0 * MIB, unit, source),
        ("growth_per_idle_cycle", 1.0 * MIB, unit, source),
        ("growth_per_request", 2.0 * MIB, unit, source),
        ("first_touch_growth", 32.0 * MIB, unit, source),
        ("judged_load_cycles", 12, "cycles", "kvdiag"),
        ("judged_idle_cycles", 11, "cycles", "kvdiag"),
        ("chance_without_trend", 0.001, "ratio", "computed"),
        ("chance_that_load_adds_nothing", 0.002, "ratio", "computed"),
        ("chance_that_dose_adds_nothing", 0.003, "ratio", "computed"),
        ("smallest_visible_leak", 4.0 * MIB, f"{unit} per cycle", "computed"),
        ("smallest_visible_leak_per_request", 1.0 * MIB, f"{unit} per request", "computed"),
    ]
