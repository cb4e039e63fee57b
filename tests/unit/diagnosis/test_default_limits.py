"""Every threshold by which diagnose judges, as shipped."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass

from kvdiag.admission import ADMISSION_LIMITS
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.steps import ISOLATION, SOAK, STEPS


def lines(limits: object, path: str) -> Iterator[str]:
    """A line for each threshold, those of parts by their path."""
    if is_dataclass(limits):
        for each in fields(limits):
            yield from lines(getattr(limits, each.name), f"{path}.{each.name}" if path else each.name)
    elif isinstance(limits, tuple) and any(is_dataclass(each) for each in limits):
        for each in limits:
            yield from lines(each, path)
    else:
        yield f"{path}: {limits}\n"


def test_a_threshold_changes_only_where_it_is_meant_to(golden: Callable[[str, str], None]) -> None:
    """Each was measured against recorded and simulated servers (docs/accuracy.md)."""
    golden("figures/limits.txt", "".join([*lines(DEFAULT_LIMITS, ""), *lines(ADMISSION_LIMITS, "admission")]))


def test_the_load_of_a_step_changes_only_where_it_is_meant_to(golden: Callable[[str, str], None]) -> None:
    """What each step offers, and how often."""
    steps = (*STEPS, ISOLATION, SOAK)
    golden("figures/steps.txt", "".join(line for one in steps for line in lines((one.workload, one.cycles), one.id)))
