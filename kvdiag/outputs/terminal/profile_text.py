"""What profiles of a server's processes showed, as text: for each process one answer, then the stacks that grew most.

Names of files and functions come from the server and are escaped. Nothing is judged here.
"""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from kvdiag.diagnosis.growth.profile_conclusion import Answer, Conclusion
from kvdiag.formatting import format_bytes, format_duration, format_number, format_ratio, plural, signed
from kvdiag.model import Frame, MemoryProfile, ProfiledLoad, StackGrowth
from kvdiag.outputs.terminal.cells import columns, heading, indented, plain

STACKS_SHOWN = 10
SHOWN_RATIO = 0.01
"""Of the growth, from which a stack is shown."""

STYLES: Mapping[Answer, str] = {"named": "bold red", "partly": "bold yellow", "native": "bold yellow", "flat": "green"}
NATIVE = {
    "host": "native (malloc arenas, tensors on the CPU, NCCL, a transport)",
    "device": "of blocks older than the profile, or not recorded",
}
TRACED = {"host": "Python allocations", "device": "recorded allocations"}
WHOLE = {"host": "anonymous memory", "device": "torch's allocated memory"}


def render_profile(profile: MemoryProfile, conclusion: Conclusion) -> RenderableType:
    """One process."""
    parts: list[RenderableType] = [
        heading(f"{profile.title} {profile.pid}"),
        Text.assemble((conclusion.answer, STYLES[conclusion.answer]), "  ", plain(sentence(profile, conclusion))),
    ]
    shown = [one for one in profile.stacks if one.bytes > SHOWN_RATIO * max(conclusion.traced_growth_bytes, 0)]
    parts.extend(_stack(one, conclusion) for one in shown[:STACKS_SHOWN])
    hidden = len(profile.stacks) - len(shown[:STACKS_SHOWN]) + profile.other_stacks
    if hidden:
        rest = conclusion.traced_growth_bytes - sum(one.bytes for one in shown[:STACKS_SHOWN])
        parts.append(plain(f"{plural(hidden, 'more stack')}: {signed(format_bytes(rest))}", "dim"))
    parts.extend(plain(note, "dim") for note in notes(profile))
    return Group(*parts)


def render_load(load: ProfiledLoad) -> RenderableType:
    """The server's speed in the three turns; nothing where it was not read."""
    rates = (load.before_per_second, load.during_per_second, load.after_per_second)
    if None in rates:
        return plain("requests per second without, with and without tracing: not read; give the server's --url", "dim")
    shown = ", ".join(format_number(rate) for rate in rates if rate is not None)
    return plain(f"requests per second without, with and without tracing: {shown}", "dim")


def sentence(profile: MemoryProfile, conclusion: Conclusion) -> str:
    """The answer in words."""
    kind, over = profile.kind, format_duration(profile.seconds)
    requests = conclusion.load.requests
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


def notes(profile: MemoryProfile) -> list[str]:
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


def _stack(one: StackGrowth, conclusion: Conclusion) -> RenderableType:
    each = conclusion.per_request(one.bytes)
    rate = "" if each is None else f"  {signed(format_bytes(each))} per request"
    table = columns("=", "", header=False)
    for frame in one.frames:
        table.add_row("", plain(location(frame), "" if frame is one.frames[0] else "dim"))
    blocks = signed(plural(one.blocks, "block"))
    return Group(plain(f"{signed(format_bytes(one.bytes))}  {blocks}{rate}"), indented(table))


def location(frame: Frame) -> str:
    """A line of code."""
    return f"{frame.file}:{frame.line}" + (f" {frame.function}" if frame.function else "")
