"""Worlds with a fault that is no plain growth: deaths, sleep, foreign memory, ranks, pools, fragmentation, caches."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate
from random import Random

from kvdiag.model import Facts, HostCache, ReservedSplit, Timeline
from tests.quality.corpus.incident import kv_pool
from tests.quality.corpus.recording import Holder
from tests.quality.corpus.tape import GIB, MIB, Tape, Track
from tests.quality.worlds.drawn_server import LONGEST, TOKEN_BYTES, DrawnServer, drawn
from tests.quality.worlds.growing_worlds import torch_of
from tests.quality.worlds.planted import DEVICE_LEAKS, Right, World
from tests.quality.worlds.request_load import Requests, offered

Made = tuple[Timeline, Facts]


def foreign(tape: Tape, *, gib: float, view: str) -> Made:
    """Another process takes memory of the server's only GPU in the middle of the day; nothing restarted."""
    at = tape.hours[-1] * tape.random.uniform(0.35, 0.65)
    server = drawn(tape, total_gib=80, fraction=round(tape.random.uniform(0.6, 0.75), 2), view=view)
    server.extra_holders = (Holder(pid=4242, name="python", held=tape.levels((at, gib * GIB)), own=False),)
    return server.play()


def off_budget(tape: Tape, *, stated: float, held: float) -> Made:
    """A server whose memory is far from the share that its configuration states, from its first sample on."""
    return drawn(tape, fraction=held, stated=stated).play()


def uneven(tape: Tape, *, gpus: int, gib: float, busy: bool) -> Made:
    """One rank holds some GiB more than the others, all day."""
    night = 0.6 if busy else 0.0
    server = drawn(tape, gpus=gpus, peak=6_000.0 if busy else 900.0, night=night, fraction=0.8, total_gib=80)
    server.device = {tape.random.randrange(gpus): tape.flat(gib * GIB)}
    return server.play()


def lives_of(tape: Tape, lives: list[tuple[float, float]], per_hour: float) -> Track:
    """Growth that starts from 0 in each life."""
    return tape.of(lambda hour: next((per_hour * (hour - begin) for begin, end in lives if begin <= hour < end), 0.0))


def restart_loop(tape: Tape, *, count: int, device: bool) -> Made:
    """Short lives, each of which grows until it dies."""
    random, lives, at = tape.random, [], 0.0
    length = tape.hours[-1] / count
    for _ in range(count):
        lives.append((at, at + length * random.uniform(0.8, 0.93)))
        at += length
    per_hour = random.uniform(5.0, 9.0) * GIB / length
    server = drawn(tape, lives=lives, fraction=0.75, total_gib=141, night=0.4)
    grown = lives_of(tape, lives, per_hour)
    server.device, server.host = ({0: grown}, None) if device else ({}, grown)
    return server.play()


def deaths(tape: Tape, *, counted: bool) -> Made:
    """Three lives of hours that end without any growth; `counted` where an agent counted failed allocations."""
    hours = tape.hours[-1]
    ends = sorted(hours * share for share in (0.3, 0.55, 0.8))
    lives = [(0.0, ends[0]), *((ends[place] + 0.2, ends[place + 1]) for place in (0, 1)), (ends[2] + 0.2, hours + 1.0)]
    server = drawn(tape, lives=lives, view="kvdiag" if counted else "standard")
    if not counted:
        return server.play()
    server.torch = (torch_of(tape, server, tape.flat()),)
    timeline, facts = server.play()
    begin = timeline.samples[0].at_seconds
    made = []
    for one in timeline.samples:
        hour = (one.at_seconds - begin) / 3600.0
        life = next((number for number, (_, end) in enumerate(lives) if hour < end), len(lives) - 1)
        last_minutes = life < 3 and hour > lives[life][1] - 0.1
        allocators = tuple(
            replace(each, ooms_total=int(last_minutes), start_ticks=1000 + life) for each in one.allocators or ()
        )
        made.append(replace(one, allocators=allocators or None))
    return Timeline(samples=tuple(made)), facts


def asleep(tape: Tape, *, leaks: bool) -> Made:
    """Sleep mode between loads; what stays while asleep rises from cycle to cycle, or does not."""
    naps, at = [], 1.0
    while at + 1.0 < tape.hours[-1]:
        naps.append((at, at + 0.9))
        at += tape.random.uniform(1.8, 2.6)
    most = 5.2 if leaks else 0.4
    share = [min(hour / (naps[-1][0] or 1.0), 1.0) for hour in tape.hours]
    floor = [(0.4 + (most - 0.4) * each) * GIB for each in share]
    server = drawn(tape, asleep=naps, asleep_bytes=floor, night=0.3)
    for place, hour in enumerate(tape.hours):
        if server._sleeps(hour):  # noqa: SLF001 - the builder's own hours
            server.requests.running[place], server.requests.held_tokens[place] = 0, 0.0
    return server.play()


def crowded(tape: Tape) -> Made:
    """More requests than the pool holds, through every working day: queues and preemptions."""
    requests = offered(tape, peak_per_hour=24_000.0, night_ratio=0.3)
    full = max(sorted(requests.held_tokens)[len(requests.held_tokens) // 2], 1.5 * LONGEST)
    return _pressed(tape, requests, full).play()


def bursts(tape: Tape) -> Made:
    """Four bursts of some minutes in a day, with some thirty preemptions in all."""
    requests = offered(tape, peak_per_hour=2_500.0, night_ratio=0.1, calm=True)
    requests.waiting = [0] * len(tape.hours)
    requests.preemptions = [0] * len(tape.hours)
    pool = kv_pool(max(1.6 * max(requests.held_tokens), 2.0 * LONGEST) * TOKEN_BYTES / GIB)
    begins = sorted(tape.random.sample(range(30, len(tape.hours) - 200), 4))
    each = tape.random.choice((7, 8))
    preempted = 0
    for place in range(len(tape.hours)):
        burst = next((begin for begin in begins if begin <= place < begin + 4), None)
        if burst is not None:
            requests.held_tokens[place] = 0.99 * pool.usable_blocks * pool.block_tokens
            requests.running[place] += 20
            requests.waiting[place] = tape.random.randint(3, 12)
            preempted += each // 4 + (place - burst < each % 4)
        requests.preemptions[place] = preempted
    return DrawnServer(tape=tape, requests=requests, pool=pool).play()


def _pressed(tape: Tape, requests: Requests, full: float) -> DrawnServer:
    """A pool of so many tokens: what does not fit waits, and some of what runs is preempted."""
    server = drawn(tape, requests=requests)
    server.pool = kv_pool(full * TOKEN_BYTES / GIB)
    taken, preempted = server.requests, 0
    taken.waiting, taken.preemptions = [], []
    for place, tokens in enumerate(taken.held_tokens):
        over = max(tokens / full - 1.0, 0.0)
        waiting = round(over * taken.running[place])
        taken.running[place] -= min(waiting, max(taken.running[place] - 2, 0))
        taken.held_tokens[place] = min(tokens, 0.985 * full)
        preempted += tape.random.randint(0, 3) if waiting > 1 else 0
        taken.waiting.append(waiting)
        taken.preemptions.append(preempted)
    return server


def long_contexts(tape: Tape) -> Made:
    """Requests so long that one takes the whole pool until it ends, while others wait."""
    requests = offered(tape, peak_per_hour=60.0, night_ratio=0.3, calm=True)
    pool = kv_pool(16.0, max_concurrency=1.3)
    tokens, count = pool.usable_blocks * pool.block_tokens, len(tape.hours)
    requests.waiting, requests.preemptions = [0] * count, [0] * count
    prompts, written, ended, place = [0.0] * count, [0.0] * count, [0.0] * count, 0
    while place < count:
        until = min(place + tape.random.randint(6, 11), count)
        prompts[place] = 0.55 * tokens
        for at in range(place, until):
            written[at] = 0.04 * tokens
            requests.running[at], requests.held_tokens[at] = 1, (0.55 + 0.04 * (at - place + 1)) * tokens
            requests.waiting[at] = tape.random.randint(1, 4)
        if until == count:
            break
        # It ended: for some minutes only short requests come, as before.
        ended[until] = 1.0
        place = until + tape.random.randint(2, 10)
    for name, more in (("prompt_tokens", prompts), ("output_tokens", written), ("ended", ended)):
        setattr(requests, name, list(accumulate(more)))
    facts = {"max_model_len_tokens": int(tokens / 1.3)}
    return DrawnServer(tape=tape, requests=requests, pool=pool, facts=facts).play()


def stranded(tape: Tape) -> Made:
    """4.8 GiB between live blocks on a plateau, and torch flushing its cache 60 times an hour."""
    server = drawn(tape, view="kvdiag", total_gib=80, fraction=0.9, quiet=True)
    gap = 4.8 * GIB

    def split(live: int, reserved: int) -> ReservedSplit:
        between = min(round(gap), reserved - live)
        return ReservedSplit(
            age_seconds=20.0,
            reserved_bytes=reserved,
            live_bytes=live,
            pending_bytes=0,
            private_bytes=0,
            releasable_bytes=reserved - live - between,
            stranded_bytes=between,
            largest_free_block_bytes=96 * MIB,
            pinned_segments=140,
            pinned_free_bytes=between,
            request_bytes=512 * MIB,
            fits=False,
            unusable_ratio=0.9,
        )

    torch = torch_of(tape, server, tape.flat(), retries=tape.of(lambda hour: 60.0 * hour))
    reserved = [value + gap for value in torch.reserved]
    server.torch = (replace(torch, reserved=reserved, split=split),)
    return server.play()


def duplicate(tape: Tape) -> Made:
    """Two engine processes of one server of the same size on one GPU, each with its weights."""
    server = drawn(tape, view="kvdiag", total_gib=80, fraction=0.4, stated=0.4, quiet=True)
    size = tape.flat(0.4 * (80 * GIB - 540 * MIB))
    server.extra_holders = (Holder(pid=702, name="VLLM::EngineCore", held=size),)
    server.facts = {"weights_bytes": 15 * GIB}
    server.pool = replace(server.pool, pool_bytes=10 * GIB)
    return server.play()


def offload(tape: Tape, *, per_hour: float, limit_gib: float) -> Made:
    """Host memory that grows steadily where an offloading cache of known size is configured."""
    most = per_hour * tape.hours[-1]
    grown = tape.of(lambda hour: min(per_hour * hour, most if most > limit_gib * GIB * 1.2 else limit_gib * GIB))
    cache = HostCache(name="vLLM's KV offloading buffer", flag="kv_offloading_size", limit_bytes=round(limit_gib * GIB))
    return drawn(tape, host=grown, caches=(cache,)).play()


def trouble_worlds(random: Random) -> Iterator[World]:
    """Every kind of trouble once or more, with drawn figures."""

    def world(
        name: str,
        row: str,
        right: Right,
        make: Callable[[Tape], Made],
        accept: tuple[str, ...],
        *,
        hours: float,
        also: tuple[str, ...] = (),
        gpus: int = 1,
    ) -> World:
        return World(name=name, row=row, right=right, make=make, accept=accept, hours=hours, also=also, gpus=gpus)

    day = random.uniform(20.0, 28.0)
    memory = ("baseline.misconfigured", "spike.activation", *DEVICE_LEAKS)
    for gib, view in ((random.uniform(9.0, 13.0), "standard"), (random.uniform(5.0, 9.0), "standard"), (8.0, "kvdiag")):
        make = partial(foreign, gib=gib, view=view)
        right: Right = "fault" if view == "kvdiag" else "suspect"
        yield world(
            f"foreign {gib:.1f} GiB {view}",
            "5 foreign",
            right,
            make,
            ("baseline.foreign_memory",),
            hours=day,
            also=memory,
        )
    for stated, held in ((0.92, 0.68), (0.9, round(random.uniform(0.45, 0.6), 2))):
        make = partial(off_budget, stated=stated, held=held)
        yield world(
            f"stated {stated}, holds {held}",
            "5 budget",
            "suspect",
            make,
            ("baseline.misconfigured",),
            hours=random.uniform(6.0, 24.0),
        )
    for gpus, gib, busy in ((8, 6.0, True), (4, random.uniform(5.0, 7.0), True), (4, 6.0, False)):
        make = partial(uneven, gpus=gpus, gib=gib, busy=busy)
        yield world(
            f"{gpus} ranks, +{gib:.1f} GiB, busy {busy}",
            "6 ranks",
            "suspect",
            make,
            ("imbalance.rank",),
            hours=random.uniform(10.0, 16.0),
            gpus=gpus,
            also=("baseline.foreign_memory", *memory),
        )
    for count, device in ((5, False), (8, True), (3, False)):
        make = partial(restart_loop, count=count, device=device)
        accept: tuple[str, ...] = DEVICE_LEAKS if device else ("leak.host",)
        yield world(
            f"{count} short lives, device {device}",
            "7 deaths",
            "suspect",
            make,
            accept,
            hours=count * random.uniform(0.55, 0.85),
            also=("spike.activation",),
        )
    make = partial(deaths, counted=True)
    accept = ("spike.activation", "spike.graph_capture")
    yield world("3 deaths, counted", "7 deaths", "suspect", make, accept, hours=day, also=("baseline.misconfigured",))
    yield world("3 deaths", "1 unexplained", "unknown", partial(deaths, counted=False), (), hours=day)
    yield world("asleep, leaking", "8 sleep", "fault", partial(asleep, leaks=True), DEVICE_LEAKS, hours=day)
    yield world("asleep", "8 sleep", "benign", partial(asleep, leaks=False), (), hours=day)
    yield world("crowded", "9 pool", "fault", crowded, ("capacity.concurrency",), hours=day)
    yield world("bursts", "9 pool", "benign", bursts, (), hours=24.0)
    yield world("long contexts", "9 pool", "suspect", long_contexts, ("capacity.long_context",), hours=10.0)
    yield world("stranded", "9 holes", "suspect", stranded, ("fragmentation.allocator",), hours=10.0)
    yield world(
        "duplicate",
        "9 duplicate",
        "suspect",
        duplicate,
        ("baseline.duplicate_model",),
        hours=8.0,
        also=("baseline.misconfigured", "baseline.foreign_memory"),
    )
    rate = random.uniform(0.6, 1.2) * GIB
    yield world(
        "offloading fills", "4 caches", "benign", partial(offload, per_hour=rate, limit_gib=24.0), (), hours=18.0
    )
    yield world(
        "beyond offloading",
        "4 caches",
        "fault",
        partial(offload, per_hour=rate, limit_gib=4.0),
        ("leak.host",),
        hours=16.0,
    )
