"""The verdict as of now: which status the newest diagnosis still supports. The one rule for every live output. Pure.

A diagnosis describes the moment at which it was made. It holds now if, checked in this order,

1. something was read within the last minute (`SILENT_SECONDS`): otherwise sampling has stopped;
2. a diagnosis exists and is at most `STALE_SECONDS` old: otherwise diagnosing has stopped;
3. it found a problem, or the server still answers: a healthy verdict says nothing about a server that is gone, but a
   fault remains a fault.

What does not hold is `unknown`, with the reason and the next step; it is never shown as healthy.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdiag.formatting import format_duration
from kvdiag.model import Snapshot, Status
from kvdiag.outputs.presentation import headline, sentence

SILENT_SECONDS = 60.0
"""Every source is read at least once a minute."""

STALE_SECONDS = 900.0
"""Age above which a diagnosis no longer counts as current: the status page, `kvdiag top`, the dashboards and the alert
KvdiagStale use this value.

A diagnosis is made every 10 s, but a slow host rests up to 300 s between two, starts at the next 10 s tick and gives
one up after 60 s: 370 s from one to the next, 740 s if one is given up. A lower limit lets a slow host flicker to
unknown.
"""

LOG = "check the log of `kvdiag serve`"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentVerdict:
    """The status now. `reason` says why the diagnosis does not hold, or what else has changed since it was made."""

    status: Status
    sentence: str
    reason: str = ""
    holds: bool = True
    """Whether the newest diagnosis is what `status` says."""


def current_verdict(snapshot: Snapshot, now_seconds: float) -> CurrentVerdict:
    """The verdict that holds at `now_seconds`."""
    diagnosis, at_seconds = snapshot.diagnosis, snapshot.diagnosed_seconds
    read_seconds = snapshot.newest.at_seconds
    if not read_seconds:
        return _unknown("nothing has been read yet; the first sample takes a few seconds")
    if now_seconds - read_seconds > SILENT_SECONDS:
        return _unknown(f"no sample for {format_duration(now_seconds - read_seconds)}; {LOG}")
    silent = _silence(snapshot)
    if diagnosis is None or at_seconds is None:
        return _unknown(silent or "no diagnosis yet; the first one takes a few seconds")
    found = headline(diagnosis.findings)
    age_seconds = now_seconds - at_seconds
    if age_seconds > STALE_SECONDS:
        stale = f"the last diagnosis is {format_duration(age_seconds)} old; {LOG}"
        return _unknown(f"{stale}. It found {found}" if found else stale)
    if diagnosis.worst in ("fault", "suspect"):
        found = sentence(diagnosis)
        return CurrentVerdict(
            status=diagnosis.worst, sentence=f"{found}; {silent}" if silent else found, reason=silent or ""
        )
    if silent is not None:
        return _unknown(silent)
    return CurrentVerdict(status=diagnosis.worst, sentence=sentence(diagnosis))


def _unknown(reason: str) -> CurrentVerdict:
    return CurrentVerdict(status="unknown", sentence=reason, reason=reason, holds=False)


def _silence(snapshot: Snapshot) -> str | None:
    """Why the server does not answer now; `None` if it does."""
    if snapshot.state == "serving":
        return None
    reason = next((gap.reason for gap in reversed(snapshot.newest.gaps) if gap.source == "engine"), None)
    if snapshot.state == "starting":
        reason = reason or "no server has answered yet; check --url"
        return reason if reason.startswith("starting") else f"starting: {reason}"
    return f"the server no longer answers{f' ({reason})' if reason else ''}; check whether it is running"
