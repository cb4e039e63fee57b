"""Combines the newest sample of each part, and tracks the health of each source. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from kvdiag.feeds.live.sampling import Ticks
from kvdiag.model import PARTS, Device, Gap, Sample, SourceHealth

SHOWN_SECONDS = 15.0
"""Age up to which a sample counts as current: three process lists, or a driver that is read rarely."""


class LatestReadings:
    """The newest value of every part. A failed read removes it at once, a missing one after a while."""

    def __init__(self) -> None:
        """Start without any sample."""
        self._at_seconds = 0.0
        self._parts: dict[str, Sample] = {}
        self._listed: dict[str, tuple[float, Device]] = {}
        self._up: dict[str, bool] = {"engine": False}
        self._errors: dict[str, int] = {}
        self._gaps: dict[str, tuple[Gap, ...]] = {}

    def add(self, sample: Sample) -> tuple[Gap, ...]:
        """Add a sample, and return the gaps that are new with it."""
        self._at_seconds = sample.at_seconds
        news: list[Gap] = []
        for source, part in PARTS.items():
            gaps = tuple(gap for gap in sample.gaps if gap.source == source)
            observed = getattr(sample, part) is not None
            if not observed and not gaps:
                continue
            failed = any(gap.kind != "absent" for gap in gaps)
            if observed:
                self._parts[source] = sample
            elif failed or source == "engine":
                self._parts.pop(source, None)
            reported = {gap.kind for gap in self._gaps.get(source, ())}
            news += [gap for gap in gaps[:1] if gap.kind not in reported]
            # Devices reported by agents are no sample of NVML's.
            if observed and source == "nvml" and sample.allocators is not None:
                continue
            self._gaps[source] = gaps
            self._errors[source] = self._errors.get(source, 0) + failed
            if observed or failed or source == "engine":
                self._up[source] = observed
            else:
                self._up.pop(source, None)  # it does not exist here, so that it cannot be down
        self._listed = {
            uuid: listed for uuid, listed in self._listed.items() if sample.at_seconds - listed[0] <= SHOWN_SECONDS
        }
        for device in sample.devices or ():
            if device.processes is not None:
                self._listed[device.uuid] = (sample.at_seconds, device)
        return tuple(news)

    def move(self, seconds: float) -> None:
        """Correct all times after the clock was set by so much."""
        self._at_seconds += seconds
        self._parts = {
            source: replace(sample, at_seconds=sample.at_seconds + seconds) for source, sample in self._parts.items()
        }
        self._listed = {uuid: (at + seconds, device) for uuid, (at, device) in self._listed.items()}

    def sample(self) -> Sample:
        """All parts as they were last read, with what is missing."""
        shown = {
            PARTS[source]: getattr(sample, PARTS[source])
            for source, sample in self._parts.items()
            if self._at_seconds - sample.at_seconds <= SHOWN_SECONDS
        }
        if shown.get("devices") is not None:
            shown["devices"] = tuple(self._with_processes(device) for device in shown["devices"])
        gaps = tuple(gap for each in self._gaps.values() for gap in each)
        return Sample(at_seconds=self._at_seconds, gaps=gaps, **shown)

    def engines_seconds(self) -> float | None:
        """When the engines were last read, `None` while they cannot be."""
        sample = self._parts.get("engine")
        return None if sample is None else sample.at_seconds

    def _with_processes(self, device: Device) -> Device:
        listed = self._listed.get(device.uuid)
        if device.processes is not None or listed is None:
            return device
        return replace(device, processes=listed[1].processes)

    def sources(self, durations_seconds: Mapping[str, float], ticks: Mapping[str, Ticks]) -> tuple[SourceHealth, ...]:
        """Every source that exists here, with how long it took and how often it was due."""
        return tuple(
            SourceHealth(
                source=source,
                up=up,
                errors_total=self._errors.get(source, 0),
                duration_seconds=durations_seconds.get(source),
                ticks_total=ticks[source].due_total if source in ticks else None,
                ticks_missed_total=ticks[source].missed_total if source in ticks else None,
            )
            for source, up in sorted(self._up.items())
        )
