"""The thresholds by which the replicas of one version are compared, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """When replicas are compared, and which growth counts."""

    replicas: int = 6
    """Replicas of one version without which it is not judged: five that all grow are 1 in 32 by chance, six 1 in 64."""

    preferred_replicas: int = 12
    """From here on 20 MB/h are detected even with level steps, random drift and many components."""

    first_seconds: float = 3600.0
    """Uptime of each replica that is left out: after an hour 9 % of a 25-minute warm-up are still to come."""

    min_seconds: float = 6 * 3600.0
    """Uptime after that hour without which a replica is not compared: a warm-up has ended by its later half."""

    certain_seconds: float = 20 * 3600.0
    """Age for a fault: bounded caches fill at a steady rate for 6 to 12 hours, which half a day cannot distinguish."""

    idle_settle_seconds: float = 5.0
    """Time after the last request from which a sample counts as idle: freed memory is returned late."""

    bins: int = 48
    """Bins of a replica's uptime, each with its median: half hours of a day, each of 60 samples at a scrape in 30 s."""

    idle_filled_ratio: float = 0.25
    """Share of them that must have idle samples, for blocks held at idle: they are exact, and nights are enough."""

    min_bytes_per_hour: float = 2e6
    """Growth of the later half from which it counts: random drift of a day stays below it in the median of six."""

    min_blocks_per_hour: float = 0.25
    """The same for KV blocks held at idle: six in a day, of a count that must be 0."""

    steps_p: float = 0.01
    """p-value of so many steps up and so few down from which the steps are the growth itself."""

    significance: float = 0.02
    """p-value of the replicas' growth (Wilcoxon signed-rank test)."""

    falls_significance: float = 0.1
    """p-value of the number of falls among all steps above which falls are part of the pattern: garbage that is
    collected every few hours would only rise if its falls were taken for jumps."""

    discovery_ratio: float = 0.05
    """Share of false ones among the components of all versions that are called (Benjamini and Hochberg)."""

    bounds_ratio: float = 0.9
    """Confidence level of the bounds of a version's growth."""


FLEET_LIMITS = FleetLimits()
