"""What people use today, on the same series: alerts on a slope, an extrapolation, a trend test, two thresholds."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erfc, sqrt
from statistics import fmean

from kvdiag.model import Facts, Timeline

HOUR = 3600.0
SLOPE_BYTES_PER_HOUR = 50 * 10**6
"""The alert on a slope that is found in public rule sets asks for some tens of MB an hour."""

SIGNIFICANCE = 0.01
FULL_RATIO = 0.9
GAP_BYTES = 2 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The series that dashboards have: used bytes of the fullest device, anonymous bytes of the host, torch's gap."""

    device: tuple[tuple[float, float], ...]
    host: tuple[tuple[float, float], ...]
    gap_bytes: tuple[tuple[float, float], ...]
    device_total_bytes: float
    host_limit_bytes: float

    def until(self, seconds: float) -> Seen:
        """What was there at a moment."""
        return Seen(
            device=self.device[: bisect_left(self.device, (seconds, float("inf")))],
            host=self.host[: bisect_left(self.host, (seconds, float("inf")))],
            gap_bytes=self.gap_bytes[: bisect_left(self.gap_bytes, (seconds, float("inf")))],
            device_total_bytes=self.device_total_bytes,
            host_limit_bytes=self.host_limit_bytes,
        )


def seen(timeline: Timeline, facts: Facts) -> Seen:
    """The series of a timeline."""
    device, host, gap = [], [], []
    total = 1.0
    for sample in timeline.samples:
        memories = [one.memory for one in sample.devices or () if one.memory is not None]
        if memories:
            total = float(memories[0].total_bytes)
            device.append((sample.at_seconds, float(max(memory.used_bytes for memory in memories))))
        if sample.host:
            host.append((sample.at_seconds, float(sum(one.anonymous_bytes or 0 for one in sample.host))))
        if sample.allocators:
            unused = max(one.reserved_bytes - one.allocated_bytes for one in sample.allocators)
            gap.append((sample.at_seconds, float(unused)))
    return Seen(
        device=tuple(device),
        host=tuple(host),
        gap_bytes=tuple(gap),
        device_total_bytes=total,
        host_limit_bytes=float(facts.host_limit_bytes or 2**50),
    )


Detector = Callable[[Seen], frozenset[str]]
"""The families of verdicts that an alert on it would mean."""

DEVICE, HOST, HOLES = "leak.device", "leak.host", "fragmentation"
FULL = "device"
"""Some trouble of device memory, whichever."""


def _both(test: Callable[[Sequence[tuple[float, float]], float], bool]) -> Detector:
    def detect(series: Seen) -> frozenset[str]:
        found = [DEVICE] if test(series.device, series.device_total_bytes) else []
        return frozenset([*found, HOST] if test(series.host, series.host_limit_bytes) else found)

    return detect


def _window(series: Sequence[tuple[float, float]], seconds: float) -> Sequence[tuple[float, float]]:
    if not series:
        return series
    return series[bisect_left(series, (series[-1][0] - seconds, 0.0)) :]


def least_squares(points: Sequence[tuple[float, float]]) -> float:
    """Slope per second, as PromQL's deriv() has it."""
    if len(points) < 2:
        return 0.0
    middle = fmean(at for at, _ in points)
    level = fmean(size for _, size in points)
    spread = sum((at - middle) ** 2 for at, _ in points)
    return sum((at - middle) * (size - level) for at, size in points) / spread if spread else 0.0


def predict_linear(window_hours: float, ahead_hours: float) -> Detector:
    """An extrapolation of the window reaches the limit so far ahead; silent until the window is half full."""

    def fires(series: Sequence[tuple[float, float]], limit: float) -> bool:
        points = _window(series, window_hours * HOUR)
        if len(points) < 2 or points[-1][0] - points[0][0] < window_hours * HOUR / 2.0:
            return False
        slope = least_squares(points)
        level = fmean(size for _, size in points) + slope * (points[-1][0] - fmean(at for at, _ in points))
        return level + slope * ahead_hours * HOUR >= limit

    return _both(fires)


def slope_of_an_hour(series: Sequence[tuple[float, float]], limit: float) -> bool:
    """deriv(x[1h]) over a threshold."""
    points = _window(series, HOUR)
    if not points or points[-1][0] - points[0][0] < HOUR / 2.0:
        return False
    return least_squares(points) * HOUR > SLOPE_BYTES_PER_HOUR


def mann_kendall(series: Sequence[tuple[float, float]], limit: float) -> bool:
    """Mann-Kendall on the raw samples of six hours, one-sided at 1 %."""
    points = _window(series, 6.0 * HOUR)
    count = len(points)
    if count < 10 or points[-1][0] - points[0][0] < HOUR:
        return False
    below: list[float] = []
    score = 0
    ties: dict[float, int] = {}
    for _, size in points:
        place = bisect_left(below, size)
        equal = ties.get(size, 0)
        score += place - (len(below) - place - equal)
        ties[size] = equal + 1
        insort(below, size)
    variance = count * (count - 1) * (2 * count + 5)
    variance -= sum(times * (times - 1) * (2 * times + 5) for times in ties.values())
    if variance <= 0 or score <= 0:
        return False
    return 0.5 * erfc((score - 1) / sqrt(variance / 18.0) / sqrt(2.0)) < SIGNIFICANCE


def nearly_full(series: Seen) -> frozenset[str]:
    """NVML's used bytes over 90 %."""
    full = series.device and series.device[-1][1] > FULL_RATIO * series.device_total_bytes
    return frozenset({FULL}) if full else frozenset()


def gap(series: Seen) -> frozenset[str]:
    """Reserved - allocated over 2 GB, where an agent reports it."""
    wide = series.gap_bytes and series.gap_bytes[-1][1] > GAP_BYTES
    return frozenset({HOLES}) if wide else frozenset()


DETECTORS: dict[str, Detector] = {
    "predict_linear(6h), 24 h": predict_linear(6.0, 24.0),
    "predict_linear(1h), 4 h": predict_linear(1.0, 4.0),
    "deriv(1h) > 50 MB/h": _both(slope_of_an_hour),
    "Mann-Kendall, raw, 6 h": _both(mann_kendall),
    "alert at NVML > 90 %": nearly_full,
    "reserved - allocated > 2 GB": gap,
}

DEVICE_TROUBLE = ("leak.device", "baseline", "spike", "fragmentation", "imbalance", "capacity")


def explains(alert: str, families: Sequence[str]) -> bool:
    """Whether an alert is right about any of these families; one on a full device is about all of the device's."""
    return any(one in DEVICE_TROUBLE if alert == FULL else one == alert for one in families)
