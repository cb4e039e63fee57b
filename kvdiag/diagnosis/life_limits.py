"""The thresholds by which the lives of a server and their ends are judged, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeLimits:
    """When a life of a server begins and ends, and when its end needs an explanation."""

    noticed_seconds: float = 60.0
    """Time after its first answer in which a new process is noticed: host and facts are read less often."""

    freed_seconds: float = 90.0
    """Time after a server's last answer in which its memory is freed: a scrape a minute, and a late one."""

    drained_idle_seconds: float = 60.0
    """Least idle time at the end of a life that is no accident: pauses of seconds are a part of bursts."""

    unexplained_exits: int = 2
    """Exits of a server within one history that make it unknown. No source gives a figure: metrics do not separate a
    planned restart from a death. One is taken for a restart. Of a server whose traffic had been taken away none
    counts; other planned ones are unknown as well, which asks for the log and calls nothing."""


LIFE_LIMITS = LifeLimits()
