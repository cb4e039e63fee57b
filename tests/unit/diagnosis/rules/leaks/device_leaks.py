"""What the rule of device leaks makes of a world."""

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.leak_device import judge
from kvdiag.model import Finding, Timeline
from tests.builders.runs import run
from tests.builders.worlds import World, facts

TORCH, NON_TORCH = "leak.device_torch", "leak.device_non_torch"


def verdicts(world: World, timeline: Timeline | None = None) -> tuple[Finding, ...]:
    """The rule's findings on a world, or on another timeline of it."""
    return judge(run(world) if timeline is None else timeline, facts(world), DEFAULT_LIMITS)
