"""The verdict as of now: which status the newest diagnosis still supports. The one rule for every live output. Pure.

A diagnosis describes the moment at which it was made. It holds now if, checked in this order,

1. something was read within the last `SILENT_SECONDS`: otherwise sampling has stopped;
2. a diagnosis exists and is at most `STALE_SECONDS` old: otherwise diagnosing has stopped;
3. it found a problem, or the server still answers: a healthy verdict says nothing about a server that has exited, but a
   fault remains a fault.

A server that no longer answers is DOWN, with any earlier verdict: that stands below it, as of the last answer. A server
whose answer is refused is not down, and not healthy either. What does not hold is `unknown`, with the reason and the
next step; it is never shown as healthy.
"""

from dataclasses import dataclass, replace

from kvdiag.formatting import format_duration
from kvdiag.model import Diagnosis, Snapshot, Status
from kvdiag.outputs.presentation import DOWN, WORDS, headline, sentence, since

SILENT_SECONDS = 60
"""Age above which sampling has stopped: one comes every second, or five where a source hangs; a starved host does not
flicker. The status page and `kvdiag top`; dashboards and the alert KvdiagStale add a minute, the age of a scrape.
"""

STALE_SECONDS = 900
"""Age above which a diagnosis no longer counts as current, for all of them.

A diagnosis is made every 10 s, but a slow host rests up to 300 s between two, starts at the next 10 s tick and gives
one up after 60 s: 370 s from one to the next, 740 s if one is given up. A lower limit lets a slow host flicker to
unknown.
"""

NO_ANSWER = "the server no longer answers"
REFUSED = "the server answers, but its metrics cannot be used"
LOG = "check the log of `kvdiag serve`"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentVerdict:
    """The status now. `reason` says why the diagnosis does not hold, or what else has changed since it was made."""

    status: Status
    sentence: str
    reason: str = ""
    holds: bool = True
    """Whether the newest diagnosis is what `status` says."""
    down: bool = False

    @property
    def word(self) -> str:
        """What is shown as the status."""
        return DOWN if self.down else WORDS[self.status]


def current_verdict(snapshot: Snapshot, now_seconds: float) -> CurrentVerdict:
    """The verdict that holds at `now_seconds`."""
    diagnosis, at_seconds = snapshot.diagnosis, snapshot.diagnosed_seconds
    read_seconds = snapshot.newest.at_seconds
    if not read_seconds:
        return _unknown("nothing has been read yet; the first sample takes a few seconds")
    if now_seconds - read_seconds > SILENT_SECONDS:
        return _unknown(f"no sample for {format_duration(now_seconds - read_seconds)}; {LOG}")
    blind = _blind(snapshot)
    if snapshot.state == "lost":
        return _down(snapshot)
    if diagnosis is None or at_seconds is None:
        return _unknown(blind or "no diagnosis yet; the first one takes a few seconds")
    found = headline(diagnosis.findings)
    age_seconds = now_seconds - at_seconds
    if age_seconds > STALE_SECONDS:
        stale = f"the last diagnosis is {format_duration(age_seconds)} old; {LOG}"
        return _unknown(f"{stale}. It found {found}" if found else stale)
    if not blind:
        return CurrentVerdict(status=diagnosis.worst, sentence=sentence(diagnosis))
    if snapshot.state == "starting" or diagnosis.worst not in ("fault", "suspect"):
        return _unknown(blind)
    return CurrentVerdict(status=diagnosis.worst, sentence=f"{sentence(diagnosis)}; {blind}", reason=blind)


def as_of_now(snapshot: Snapshot) -> Diagnosis | None:
    """The newest diagnosis; of a server that does not answer, or whose answer is refused, nothing is healthy now."""
    diagnosis, blind = snapshot.diagnosis, _blind(snapshot)
    if diagnosis is None or (blind is None and diagnosis.down_since_seconds is None):
        return diagnosis
    worst: Status = "unknown" if diagnosis.worst == "ok" else diagnosis.worst
    findings = tuple(
        replace(one, status="unknown", summary=blind or NO_ANSWER, evidence=()) if one.status == "ok" else one
        for one in diagnosis.findings
    )
    diagnosis = replace(diagnosis, worst=worst, findings=findings)
    if not diagnosis.lives:
        return diagnosis
    last = diagnosis.lives[-1]
    if snapshot.state == "lost":
        since_seconds = snapshot.down_since_seconds or snapshot.newest.at_seconds
        last = replace(last, end_seconds=since_seconds, end="unreachable", end_detail=_engine_gap(snapshot))
    elif last.end_seconds is None and last.worst == "ok":
        last = replace(last, worst="unknown")
    return replace(diagnosis, lives=(*diagnosis.lives[:-1], last))


def _down(snapshot: Snapshot) -> CurrentVerdict:
    """That the server is down, then what was found until then, healthy or not."""
    banner = since(snapshot.down_since_seconds or snapshot.newest.at_seconds, _engine_gap(snapshot))
    diagnosis = as_of_now(snapshot)
    if diagnosis is None or not diagnosis.lives:
        return CurrentVerdict(status="unknown", sentence=banner, reason=banner, holds=False, down=True)
    found = sentence(diagnosis)
    holds = diagnosis.worst in ("fault", "suspect")
    return CurrentVerdict(status=diagnosis.worst, sentence=found, reason=banner, holds=holds, down=True)


def _unknown(reason: str) -> CurrentVerdict:
    return CurrentVerdict(status="unknown", sentence=reason, reason=reason, holds=False)


def _blind(snapshot: Snapshot) -> str | None:
    """Why the present state of the server is not visible; `None` if it is."""
    if snapshot.state == "lost":
        return NO_ANSWER
    if snapshot.state == "starting":
        reason = _engine_gap(snapshot) or "no answer yet; check --url"
        return reason if reason.startswith("no answer yet") else f"no answer yet: {reason}"
    refused = snapshot.newest.engine_refused
    return refused and f"{REFUSED}: {refused}; run `kvdiag doctor`"


def _engine_gap(snapshot: Snapshot) -> str | None:
    return next((gap.reason for gap in reversed(snapshot.newest.gaps) if gap.source == "engine"), None)
