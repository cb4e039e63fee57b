"""`kvdiag diagnose TRACE TRACE...`: several traces as the replicas of a fleet, each judged and all compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvdiag.commands.histories.fleet_history import show
from kvdiag.commands.options.report_file import ReportFile
from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.fleet import ReplicaSummary, compare, summarise
from kvdiag.diagnosis.limits import Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.postmortem_inputs import recognise
from kvdiag.feeds.recording.folder_timeline import read_recorded
from kvdiag.feeds.recording.trace import NotATraceError
from kvdiag.model import Facts, Timeline
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged


def examine_traces(paths: Sequence[Path], limits: Limits, page: ReportFile, output: str) -> int:
    """Judge each trace, compare all, report and print the result, and give its exit code. One trace is held at a time.

    Raises:
        KvdiagError: one of them cannot be read, or is given twice.

    """
    known: dict[Path, Path] = {}
    for path in paths:
        if (same := known.setdefault(path.resolve(), path)) is not path:
            raise KvdiagError(f"{same} is given twice: a replica that counts twice would prove too much")
    judged: list[Judged] = []
    summaries: list[ReplicaSummary] = []
    for path in paths:
        timeline, facts = recorded(path)
        name = str(path)
        judged.append(Judged(key=name, subject=(("trace", name),), diagnosis=diagnose(timeline, facts, limits)))
        summaries.append(summarise(timeline, facts, limits, replica=name))
    result = FleetDiagnosis(
        source=None, judged=tuple(sorted(judged, key=Judged.order)), fleet=compare(summaries, limits), gaps=()
    )
    return show(result, output, page, lambda worst: read_recorded(Path(worst.key))[0])


def recorded(path: Path) -> tuple[Timeline, Facts]:
    """What a recorder has kept at `path`.

    Raises:
        KvdiagError: it cannot be read; of what a dead server left it says how that is judged.

    """
    try:
        return read_recorded(path)
    except NotATraceError as error:
        raise KvdiagError(f"{error}{_instead(path)}") from error


def _instead(path: Path) -> str:
    """What to do with a file that is no trace."""
    try:
        kind = recognise(path)
    except KvdiagError:
        return ""
    told = {"log": "if it is an engine's log", "black box": "to judge an agent's black box"}
    return f"; {told[kind]}, add --postmortem" if kind in told else ""
