"""The thresholds of the growth estimator, of test cycles and of soaks, each with its reason.

Three sets, because three kinds of evidence are judged: samples of hours under unknown load (`GrowthLimits`), long runs
of load and idle cycles (`SoakLimits`) and the few equal cycles of a test step (`CycleLimits`). A set holds for every
component of memory. Those that depend on what is measured (least growth, certainty) were chosen by the benchmarks
`growth_power` and `soak_power` and by the corpus of incidents: no healthy history may become a fault.
"""

from dataclasses import dataclass

KIB = 2**10
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthLimits:
    """When a series of memory samples counts as growing: one set for every component and every length of history."""

    window_hours: tuple[float, ...] = (1.0, 3.0, 6.0, 12.0, 24.0, 48.0, 96.0, 192.0)
    """Windows that end now: an hour finds 500 MB/h, a day 20 MB/h, and no length of history is too long."""

    whole_history_ratio: float = 1.25
    """A history longer than the longest window by this is a window of its own."""

    bins: int = 36
    min_bins: int = 16
    """Bins of a window: enough to test, few enough that each has some samples and little autocorrelation."""

    bin_readings: float = 2.0
    """Scrape intervals in a bin: of bins of a minute, scraped each 60 s, some stay empty."""

    late_ratio: float = 0.25
    """Share of a minute by which the samples of a bin may come late: scrapes of a minute are 61 s apart."""

    dense_seconds: float = 35.0
    """Time between samples up to which a bin of a minute has two."""

    filled_ratio: float = 0.75
    """Share of a window's bins that must have samples; the others are interpolated, and are no evidence."""

    load_filled_ratio: float = 0.3
    """Share of the minutes whose load must be reported for it to be removed."""

    load_correlation: float = 0.25
    """Correlation of memory's differences with the load's from which it is removed; twice the standard error of no
    correlation."""

    min_gain_bytes: float = 150e6
    """Least growth over a window: allocators, page tables and caches of a healthy server move by less."""

    min_bytes_per_hour: float = 4e6
    """Least rate, however long the history: it takes a month to use up 3 GB."""

    floor_ratio: float = 0.375
    """Rise of the lowest samples over the claimed gain: half of the rise between the medians of two quarters."""

    raw_floor_ratio: float = 0.5
    """The same where falls were taken out of the window, of which the claim knows nothing."""

    largest_quarter_ratio: float = 0.75
    """Share of the rise that may come between two quarters of a window: more is one event."""

    later_ratio: float = 0.5
    last_quarter_ratio: float = 0.15
    """Rate of the later half over the earlier, and share of the last quarter: below them growth is ending."""

    past_minutes: int = 24 * 60
    past_windows: float = 4.0
    """History that a window is compared with: a day, so that it covers each hour's load, or four windows."""

    compared_windows: float = 2.0
    compared_minutes: float = 180.0
    """History without which gate 6 is skipped: two windows, and three hours."""

    past_quantile: float = 0.95
    new_ground_ratio: float = 0.5
    """How much of its rise must lie above nearly all of the history: a garbage collector's next cycle does not."""

    suspect_strength: float = 3.0
    fault_strength: float = 4.5
    """Slope over its standard error."""

    drift_pieces: tuple[int, ...] = (12, 5)
    """Increments of the random-walk test: twelve can be tested sharply, five are longer than slow noise."""

    drift_p: float = 0.05
    certain_drift_p: float = 0.004
    """p-values of so regular a rise in a random walk, for a suspect and for a fault."""

    certain_gain_bytes: float = 4 * GIB
    """Growth from which a window that passes for a suspect is a fault: on the drawn servers of seeds 1 to 3 no drift or
    warm-up took as much (tests/quality/worlds)."""

    past_quarters: int = 12
    """Quarters of earlier windows that gate 9 needs for its comparison: three windows."""

    suspect_beyond_past: float = 1.4
    fault_beyond_past: float = 2.0
    """Rise over the largest movement of earlier windows of this length."""

    steps_ratio: float = 0.5
    """Rate without steps over that with them, below which growth came in steps."""

    steps_per_hour: float = 2.0 / 3.0
    """How often the level of a healthy server moves, up or down: arenas and caches take and return memory every few
    hours."""

    steps_p: float = 0.035
    certain_steps_p: float = 0.001
    """p-values of so many steps within the time, all of them up: two in an hour are suspect and four a fault; of a day,
    in which as many may come anyway, five and ten."""

    counted_steps_p: float = 0.005
    """The same for a suspect of uneven growth: three adapters of a day are none."""

    large_step_bytes: int = 128 * MIB
    large_steps_per_hour: float = 1.0 / 6.0
    """Size from which levels of healthy servers move more rarely, and how often: two of malloc's arenas at once."""

    counted_steps: int = 3
    largest_step_ratio: float = 0.5
    """Steps from which their number decides, and the largest share of one: two may be adapters that were loaded."""

    step_patience: float = 3.0
    """Mean intervals after the last step from which they have ended: of steps by chance one in twenty waits so long."""

    longest_pause_ratio: float = 2.0
    """Time after the last step, over the longest between two of them, from which a fault by their number has ended."""

    record_ratio: float = 0.05
    """Rise of the highest load so far from which a step at that time may be a high-water mark."""

    jump_deviations: float = 6.0
    jump_min_bytes: int = 24 * MIB
    """Deviations of a series' own differences, and least size, of a step: allocators round to 2 and 20 MiB."""

    small_fall_ratio: float = 0.02
    """Share of a window's range below which a step down is none: an arena of 100 MiB among steps up of 2 GiB."""

    confirming_ratios: tuple[float, ...] = (0.0, 1.0 / 6.0, 1.0 / 3.0)
    """How long ago a window must have passed as well, in window lengths: noise passes once, growth every time."""

    confirming_filled_ratio: float = 0.66
    """Share of an earlier window that the history must reach back to: a history of one window is worth judging."""

    suspect_windows: int = 2
    fault_windows: int = 2
    """Evaluations that must grow for a suspect; of a fault all do, and so many reach its limits."""

    held_windows: float = 1.0
    """How long a fault holds while its growth continues unevenly, in windows: then another window has to show it."""

    paused_ratio: float = 1.0 / 3.0
    held_rate_ratio: float = 0.25
    """How long it holds, in windows, at less than this share of its rate: then the growth has ended."""

    held_later_ratio: float = 1.0 / 3.0
    """Rise of the later half of the whole history over the earlier, below which no short window holds: a warm-up."""

    held_steps: int = 6
    held_share: int = 12
    held_minutes: int = 10
    """Looks back in a window's length, the share of the window whose median is its level, and the least such time."""

    released_ratio: float = 0.5
    """Share of a fault's growth whose return ends the fault."""

    slowing_hours: float = 8.0
    """Shorter windows do not decide while each fifth of the history rises less than the one before."""

    still_to_come_ratio: float = 0.5
    """Windows' worth of its later rate that growth which levels off exponentially still has before it."""

    slowing_ratio: float = 0.8
    slowing_fifth_minutes: int = 12
    """Rise of the last fifth over the first below which growth is slowing, and the least length of a fifth."""

    collected_hours: float = 1.9
    """Window from which garbage-collected memory without a longer history may be a fault: with those that confirm it,
    three hours, which include most collections."""

    collected_steps_hours: float = 3.0
    """Time from the first step of such memory to its last from which steps alone are a fault: a heap warms up, or waits
    for a collection, in steps as well."""

    collected_bytes: float = 2 * GIB
    """Growth beyond which it is no garbage that a collection has yet to return, on the same drawn servers."""

    visible_errors: float = 4.0
    """Standard errors of a slope that are the detection limit: four of five leaks of that rate are detected."""

    part_ratio: float = 0.5
    """Rate of a part of the server's memory over that of the whole from which it is the part that grows."""

    burst_hours: float = 1.0 / 3.0
    burst_gain_bytes: float = 1e9
    burst_exhaustion_seconds: float = 3600.0
    """Growth within twenty minutes counts from a gigabyte on, where the room would be used up within the hour: reported
    servers lost 20 GB in 46 minutes."""

    short_life_seconds: float = 5400.0
    """Life of a server up to which the estimator has no window of it: half an hour of warm-up, and an hour."""

    short_lives: int = 3
    climbing_ratio: float = 0.75
    """Short lives that must climb to their end, and their share of all: fewer may be a rollout that was repeated."""

    sleeps: int = 5
    sleep_p: float = 0.01
    certain_sleep_p: float = 0.002
    """Sleeps without which the memory in use while asleep is not compared, and p-values of its rise: five that all rise
    are suspect, six a fault."""

    recent_p: float = 0.01
    recent_min_seconds: float = 30.0
    """The most p-value and least length of a rate of the last minutes: requests come and go within seconds."""

    recent_seconds: float = 600.0
    recent_spacing_seconds: float = 5.0
    """The last minutes, as `kvdiag top` shows them: a device full within the hour at their rate is unknown."""

    exhaustion_errors: float = 2.0
    """Errors of the rate on either side of a time to exhaustion: 1.4 contained the truth in only 7 of 12 cases."""

    reading_seconds: float = 14.5
    """Least time between two samples of a component that are kept: four in a minute give its median."""

    reading_age_seconds: float = 300.0
    """Age of a component's newest sample at the end from which its process counts as exited."""

    engine_age_seconds: float = 90.0
    """Age up to which an engine sample gives the load of another sample: scrapes come every 15 to 60 s."""

    warmup_seconds: float = 1800.0
    warmup_ratio: float = 0.25
    """Uptime of a process that is left out, if its start was observed, and its largest share: kernels, graphs and pools
    are loaded in it."""

    warmup_hours: float = 1.0
    """Time constant of the slowest warm-up that continues after that: growth whose rate keeps up is none."""

    steady_bytes: float = 400e6
    """Growth at a rate that keeps up from which it is a fault within two hours: healthy heaps return less at once."""

    steady_work_ratio: float = 0.8
    """Work of the later half of a window over the earlier: where work falls, a warm-up looks even over work."""

    resident_hours: float = 6.0
    """Window from which growing resident bytes are a leak, although they include mapped files."""

    cache_passed_ratio: float = 1.05
    """Growth over the size limit of a cache from which it is not the cache: its overhead per entry is not counted."""

    cache_bytes: int = 8 * GIB
    """Host memory that a cache of unknown size limit may take: llama.cpp's prompt cache, the largest known default. On
    a device all known caches are taken at start."""

    cache_fill_seconds: float = 25.0 * 3600.0
    """The longest time that reported caches of that size took to fill: slower growth is not a cache."""

    cache_urgent_seconds: float = 4 * 3600.0
    """Time to exhaustion below which it no longer matters whether it is a cache: on-call has to act."""

    def after_warmup(self, begin_seconds: float, end_seconds: float) -> float:
        """When the warm-up of a process that began at one time, and was last observed at another, is left out."""
        return begin_seconds + min(self.warmup_seconds, self.warmup_ratio * max(end_seconds - begin_seconds, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakLimits:
    """What is still normal over alternating load and idle cycles."""

    cycles: int = 12
    """Load cycles of new content without which a soak does not decide: with 6 no test reaches 1 %."""

    idle_cycles: int = 4
    """Idle cycles next to nine load cycles (twelve less the first touch) without which the two cannot be separated."""

    warmup_ratio: float = 0.25
    warmup_cycles: int = 3
    """Load cycles left out as first touch: this share, at least so many. If they were judged, a ratcheting allocator
    would be called a leak every time, now in 2 of 1,000."""

    significance: float = 0.01
    """p-value of the trend over load cycles (Mann-Kendall)."""

    load_significance: float = 0.01
    """p-value of load cycles rising above the idle ones (Mann-Whitney): if another process grows, the trend alone
    blames the server in 93 of 100 soaks; this test does so at 5 % in 7 of 100, at 1 % in 1."""

    device_bytes: int = MIB
    """Least growth per load cycle that counts where the driver's 2-MiB pages are read: a page every other cycle."""

    host_bytes: int = 256 * KIB
    """The same for host memory, which moves by malloc's own 128-KiB steps and pages of page tables."""

    host_deviations: float = 3.0
    """For host memory also: so many deviations of the idle cycles' noise, over the number of cycles."""

    steady_ratio: float = 0.5
    """The later half's slope over the earlier's, and the last third's gain over its share of the slope: below it growth
    is ending."""

    ended_ratio: float = 0.25
    """The same ratio below which growth has ended; between the two it is unknown."""

    dose_significance: float = 0.05
    """p-value of the largest dose leaving more than the smallest: additional evidence, no gate."""

    bin_cycles: int = 6
    """Samples in a bin whose lowest must rise, for host memory: garbage is collected in between, and the trend alone
    would blame a third of the heaps that are collected now and then."""

    min_bins: int = 3
    """Such bins, whose lowest samples have to rise: of two every other pair does."""

    max_bins: int = 6
    """Bins of a long soak: longer ones cover a longer period of a collector, and their lowest sample is less
    noisy."""

    background_ratio: float = 0.7
    """Growth of the idle cycles over that of the load cycles from which it is not the requests'."""

    certain_bins: int = 5
    """Bins from which rising host memory is a fault, with fewer a suspect: these may lie within one period of a
    collector."""

    min_repeats: int = 2
    """Repeated cycles, after the one that brought the contents, without which they decide nothing."""

    content_ratio: float = 0.25
    """Growth per request of repeated content over that of new content, below which content is cached, not leaked."""

    visible_deviations: float = 2.0
    visible_ratio: float = 2.0
    """Detection limit per cycle: so many deviations of the idle cycles' steps, and so often the least growth that
    counts, since half of the leaks of just that size measure smaller."""

    first_touch_ratio: float = 2.0
    """Gain of the first load cycles over that limit from which memory grew and has ended, rather than was flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleLimits:
    """When bytes after each of several equal test cycles count as growing: there are few cycles, and the test is
    exact.
    """

    warmup_ratio: float = 0.25
    warmup_cycles: int = 2
    """Equal cycles left out as first touch, at least so many: lazily loaded kernels and workspaces come with the first
    requests of a shape and never return, so a before/after test of one request is wrong half of the time."""

    judged_cycles: int = 3
    """Equal cycles left after warm-up without which growth is not judged."""

    rising_ratio: float = 0.75
    """Share of judged cycles in which a leak must have grown. One step among flat cycles is an event, not a leak."""

    deceleration_ratio: float = 0.5
    """Growth of the later judged cycles over that of the earlier: below it growth is coming to an end."""


GROWTH_LIMITS, CYCLE_LIMITS, SOAK_LIMITS = GrowthLimits(), CycleLimits(), SoakLimits()
