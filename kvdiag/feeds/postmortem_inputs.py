"""Reads the files of a crashed server, such as black boxes, a trace, logs or a bare message, into one `Case`.

A file's kind is detected from its content and not from its name: a folder is the agents', JSON with kvdiag's mark is a
trace or a black box, any other text is a log. What a log prints before its first failure is the report of the start.
Of several black boxes the one that agrees with a failure in a log is taken, else the oldest, since later failures are
its consequences. A log without a failure is noted as such. A file that cannot be read is an error and not a gap: the
user named it. The causes are judged by `diagnosis.postmortem`.
"""

import gzip
import re
import stat
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from kvdiag.diagnosis.postmortem import Case
from kvdiag.diagnosis.postmortem.case import agree
from kvdiag.diagnosis.prescriptions.known_reports import signs_in
from kvdiag.engine_features import features_logged
from kvdiag.engines import DEFAULT, ENGINES, engine_of_log, flags_of
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.trace import read_trace
from kvdiag.files import GZIP_MAGIC
from kvdiag.kv.calibration.engine_report import EngineReport
from kvdiag.model import Gap
from kvdiag.oom.account import Account
from kvdiag.oom.log import REQUEST_LINE, read_failures
from kvdiag.sources.agents.black_boxes import read_file, read_folder
from kvdiag.sources.agents.census_publication import shown_request
from kvdiag.sources.log_file import read_long_log

Kind = Literal["black box", "trace", "log"]
PEEK_BYTES = 64 * 2**10
MAX_FILES = 64


def gather(
    files: Sequence[Path],
    *,
    logs: Sequence[Path] = (),
    boxes: Sequence[Path] = (),
    traces: Sequence[Path] = (),
    show_request_ids: bool = False,
) -> Case:
    """Read everything that is given; the kind of each of `files` is detected from its content.

    Raises:
        KvdiagError: one of them cannot be read or is nothing of the kind, or there is more than one trace.
    """
    named: list[tuple[Path, Kind]] = [(path, "black box") for path in boxes]
    named += [(path, "log") for path in logs]
    named += [(path, "trace") for path in traces]
    named += [(path, recognise(path)) for path in files]
    if len(named) > MAX_FILES:
        raise KvdiagError(f"{len(named)} files: give those of one failure, {MAX_FILES} at most")
    if sum(kind == "trace" for _, kind in named) > 1:
        raise KvdiagError("more than one trace: give the one that ends with the failure")
    # A bare message of torch does not say which engine it was.
    case = Case(flags=DEFAULT.flags)
    found: list[Account] = []
    for path, kind in named:
        if kind == "trace":
            timeline, facts = read_trace(path)
            case = replace(case, timeline=timeline, facts=facts, flags=flags_of(case.engine_name or facts.engine_name))
        elif kind == "log":
            case = _with_log(case, path, show_request_ids=show_request_ids)
        elif path.is_dir():
            if any(path.glob("kvdiag-*.jsonl.gz")):
                raise KvdiagError(f"{path} is a recording of `kvdiag serve`: read it with `kvdiag diagnose {path}`")
            read, gaps = read_folder(path, show_request_ids=show_request_ids)
            if not read:
                reason = gaps[0].reason if gaps else "no allocation failed under an agent, or it is the wrong folder"
                gaps = (*gaps, Gap("black_box", "absent", f"no black box in {path}: {reason}"))
            found += read
            case = replace(case, gaps=(*case.gaps, *gaps))
        else:
            if path.exists() and not path.is_file():
                raise KvdiagError(f"{path} is not a file")
            found.append(read_file(path, read_long_log(path)[0], show_request_ids=show_request_ids))
    return _with_box(case, found)


def recognise(path: Path) -> Kind:
    """What a file is, by its content; a folder is one of agents.

    Raises:
        KvdiagError: it cannot be read, is empty or binary, or is an agent's publication.
    """
    if str(path) == "-":
        return "log"
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return "black box"
        if not stat.S_ISREG(mode):
            return "log"
        with path.open("rb") as file:
            begin = file.read(PEEK_BYTES)
        if begin.startswith(GZIP_MAGIC):
            with gzip.open(path) as unpacked:
                begin = unpacked.read(PEEK_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise KvdiagError(f"cannot read {path}: {reason}") from error
    except ValueError as error:
        raise KvdiagError(f"cannot read {str(path)!r}: {error}") from error
    if not begin.strip():
        raise KvdiagError(f"{path} is empty")
    if b"\0" in begin:
        raise KvdiagError(f"{path} is binary: give a black box, a trace, an engine's log or its message")
    first = begin.lstrip()[:200]
    if first.startswith(b"{") and b'"kvdiag_trace"' in first:
        return "trace"
    if first.startswith(b"{") and b'"kvdiag_black_box"' in first:
        return "black box"
    if first.startswith(b"{") and b'"kvdiag_agent"' in first:
        raise KvdiagError(f"{path} is an agent's publication of a running process: give the folder, or an oom-….json")
    return "log"


def _with_log(case: Case, path: Path, *, show_request_ids: bool) -> Case:
    content, whole = read_long_log(path)
    origin = "standard input" if str(path) == "-" else path.name
    if not content.strip():
        raise KvdiagError(f"{origin} is empty")
    if b"\0" in content[:PEEK_BYTES]:
        raise KvdiagError(f"{origin} is binary: give an engine's log or its message")
    text = content.decode("utf-8", "replace")
    failure = read_failures(text, origin)
    case = _with_settings(replace(case, has_log=True, engine_name=case.engine_name or engine_of_log(text)), text)
    gaps = case.gaps
    if not whole:
        reason = f"{origin} is long: its beginning, its end and the part around its first failure were read"
        gaps = (*gaps, Gap("log", "absent", reason))
    if failure is None:
        return replace(_with_report(case, text), gaps=gaps, clean_logs=(*case.clean_logs, origin))
    last = tuple(
        replace(one, request=shown_request(one.request, show_request_ids=show_request_ids))
        for one in failure.last_requests
    )
    failure = replace(failure, last_requests=last)
    case = replace(case, kv_connector=case.kv_connector or failure.connector)
    before = "\n".join(re.split(r"\r\n|\n|\r", text)[: failure.line])
    failed_pools = (engine.failed_pool_bytes(before) for engine in ENGINES)
    return replace(
        _with_report(case, before),
        accounts=(*case.accounts, failure),
        failed_pool_bytes=next((size for size in failed_pools if size is not None), case.failed_pool_bytes),
        gaps=gaps,
    )


def _with_settings(case: Case, text: str) -> Case:
    """The case with the connector and the features that a log shows, and the known reports whose line it has."""
    name = case.engine_name
    engine = next((one for one in ENGINES if one.name == name), None)
    lines = [line for line in text.splitlines() if "kv_transfer_config" in line and not REQUEST_LINE.search(line)]
    connector = None if engine is None else engine.kv_connector((), lines)
    signs = tuple(dict.fromkeys((*case.signs, *signs_in(text, name))))
    features = features_logged(name, text) if case.features is None else case.features
    return replace(case, kv_connector=case.kv_connector or connector, features=features, signs=signs)


def _with_report(case: Case, text: str) -> Case:
    """The case with what its engine printed at start, where no log before has shown it."""
    if case.has_report:
        return case
    name = case.engine_name
    for engine in sorted(ENGINES, key=lambda one: one.name != name):
        if name not in {None, engine.name}:
            break
        try:
            report = engine.parse_startup_log(text)
        except KvdiagError:
            # The server exited before it printed its memory figures; its settings may be printed all the same.
            report = EngineReport(settings=engine.parse_settings(text.splitlines()))
        if report != EngineReport():
            return replace(case, report=report, engine_name=engine.name, flags=engine.flags)
    return replace(case, engine_name=name, flags=flags_of(name))


def _with_box(case: Case, boxes: list[Account]) -> Case:
    """The black box of the failure in the log, else the oldest: those after it are its consequences."""
    if not boxes:
        return case
    reported = case.accounts
    boxes = sorted(boxes, key=lambda box: (box.unverified, box.at_seconds or 0.0))
    chosen = next((box for box in boxes if any(agree(box, other) for other in reported)), boxes[0])
    return replace(case, accounts=(*reported, replace(chosen, later=len(boxes) - 1)))
