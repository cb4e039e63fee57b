"""What profiles of a server's processes showed, in sentences that text and HTML share. Nothing is judged here."""

from collections.abc import Sequence

from kvdiag.formatting import format_bytes, format_duration, format_number, format_ratio, plural, signed
from kvdiag.model import ConcludedProfile, Frame, MemoryProfile, ProfiledLoad, StackGrowth

TITLE = "Lines of code that hold what was gained"
STACKS_SHOWN = 10
SHOWN_RATIO = 0.01
"""Of the growth, from which a stack is shown."""

NATIVE = {
    "host": "native (malloc arenas, tensors on the CPU, NCCL, a transport)",
    "device": "of blocks older than the profile, or not recorded",
}
TRACED = {"host": "Python allocations", "device": "recorded allocations"}
WHOLE = {"host": "anonymous memory", "device": "torch's allocated memory"}


def profile_sentence(conclusion: ConcludedProfile) -> str:
    """The answer in words."""
    profile = conclusion.profile
    kind, over = profile.kind, format_duration(profile.seconds)
    requests = profile.load.requests
    served = f", {plural(round(requests), 'request')}" if requests is not None else ""
    process, named = conclusion.process_growth_bytes, conclusion.traced_growth_bytes
    whole = f"{WHOLE[kind]} not read twice" if process is None else f"{WHOLE[kind]} {_grew(process)}"
    both = f"{whole}, {TRACED[kind]} {_grew(named)} in {over}{served}"
    if conclusion.answer == "native":
        return f"{both}: {NATIVE[kind]}"
    if conclusion.answer == "flat":
        return f"{both}: too little to name; profile for longer, or under more load"
    each = conclusion.per_request(named)
    rate = f", {signed(format_bytes(each))} per request" if each is not None else ""
    if conclusion.answer == "partly" and conclusion.explained_ratio is not None:
        return f"{both}{rate}: the stacks below explain {format_ratio(conclusion.explained_ratio)}, the rest is native"
    return f"{both}{rate}: held by the stacks below"


def profile_notes(profile: MemoryProfile) -> list[str]:
    """What tracing did to the process, and what limits the result."""
    snapshots = [one for one in (profile.first, profile.last) if one is not None]
    held = " and ".join(format_duration(one.held_seconds) for one in snapshots)
    traces = format_bytes(max(one.tracing_bytes for one in snapshots))
    said = [f"tracing took {traces}; its snapshots held the interpreter for {held}"]
    if profile.tracing_full:
        early = "before the warm-up was over, so caches that fill are among the stacks" if profile.first is None else ""
        ended = f"after {format_duration(profile.ended_monotonic_seconds - profile.began_monotonic_seconds)}"
        said.append(f"the traces reached their limit {' '.join(filter(None, (ended, early)))}")
    return said


def _grew(size: int) -> str:
    return f"grew {format_bytes(size)}" if size >= 0 else f"shrank {format_bytes(-size)}"


def shown_stacks(conclusion: ConcludedProfile) -> Sequence[StackGrowth]:
    """The stacks that hold most of the growth."""
    least_bytes = SHOWN_RATIO * max(conclusion.traced_growth_bytes, 0)
    return [one for one in conclusion.profile.stacks if one.bytes > least_bytes][:STACKS_SHOWN]


def other_stacks(conclusion: ConcludedProfile) -> str | None:
    """The stacks that are not shown; `None` without any."""
    shown = shown_stacks(conclusion)
    hidden = len(conclusion.profile.stacks) - len(shown) + conclusion.profile.other_stacks
    rest = conclusion.traced_growth_bytes - sum(one.bytes for one in shown)
    return f"{plural(hidden, 'more stack')}: {signed(format_bytes(rest))}" if hidden else None


def stack_line(one: StackGrowth, conclusion: ConcludedProfile) -> str:
    """The growth of one stack."""
    each = conclusion.per_request(one.bytes)
    rate = "" if each is None else f"  {signed(format_bytes(each))} per request"
    return f"{signed(format_bytes(one.bytes))}  {signed(plural(one.blocks, 'block'))}{rate}"


def load_line(load: ProfiledLoad) -> str:
    """The server's speed in the three turns."""
    rates = (load.before_per_second, load.during_per_second, load.after_per_second)
    known = None not in rates
    shown = ", ".join(format_number(rate) for rate in rates if rate is not None)
    return f"requests per second without, with and without tracing: {shown if known else 'not read'}"


def location(frame: Frame) -> str:
    """A line of code."""
    return f"{frame.file}:{frame.line}" + (f" {frame.function}" if frame.function else "")
