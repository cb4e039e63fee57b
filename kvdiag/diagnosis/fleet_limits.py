"""The thresholds by which replicas of one version are compared, each with its reason; `Limits` holds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """From when on replicas are compared, and what growth of theirs counts."""

    replicas: int = 6
    """Replicas of one version without which it is not judged: five that all grow are 1 in 32 by chance, six 1 in 64."""

    preferred_replicas: int = 12
    """From here on 20 MB/h show among level steps and wandering memory, too, and among many components."""

    first_seconds: float = 3600.0
    """Life of each replica that is left out: after an hour 9 % of a warm-up of 25 minutes are still to come."""

    least_seconds: float = 6 * 3600.0
    """Life after that hour without which a replica is not compared: the later half of a warm-up is flat by then."""

    certain_seconds: float = 20 * 3600.0
    """Age for a fault: bounded caches fill at a steady rate for 6 to 12 hours, which half a day cannot tell."""

    idle_settle_seconds: float = 5.0
    """A reading counts as idle so long after the last request: freed memory is returned late."""

    blocks: int = 48
    """Medians that stand for a replica's life: half hours of a day, each of 60 readings at a scrape in 30 s."""

    idle_blocks_ratio: float = 0.25
    """Share of them that must hold idle readings, for blocks held at idle: they are exact, and nights are enough."""

    least_bytes_per_hour: float = 2e6
    """Growth of the later half from which it counts: what wanders for a day stays below it in the middle of six."""

    least_blocks_per_hour: float = 0.25
    """The same for KV blocks held at idle: six in a day, of a count that must be 0."""

    steps_p: float = 0.01
    """p-value of so many steps up and so few down from which they are the growth, and not events beside it."""

    significance: float = 0.02
    """Chance of as many replicas growing as much where either direction is as likely (signed ranks)."""

    falls_significance: float = 0.1
    """Chance of so many falls beside the rises of all replicas up to which they are the rule: garbage that is collected
    every few hours only rises once its falls are taken for jumps."""

    discovery_ratio: float = 0.05
    """Share of false ones among the components of all versions that are called (Benjamini and Hochberg)."""

    bounds_ratio: float = 0.9
    """Probability that the bounds beside a version's growth hold it."""


FLEET_LIMITS = FleetLimits()
