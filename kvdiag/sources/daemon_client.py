"""What a running `kvdiag serve` knows, read back from its pages: a Snapshot, and the ledger's lines.

Its answers are no more trusted than any other server's: they are bounded, and become values whose constructors refuse
what cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from kvdiag.model import (
    Device,
    Diagnosis,
    Engine,
    Evidence,
    Facts,
    Finding,
    Gap,
    GapKind,
    GrowthFigures,
    ImbalanceFigures,
    KvPool,
    LedgerLine,
    Memory,
    Provenance,
    Sample,
    Snapshot,
    SourceHealth,
    Status,
)
from kvdiag.sources.http import Answer, HttpReader, Unreadable
from kvdiag.sources.prometheus_text import Page, parse_page

SCHEMA_VERSIONS = (1, 2)
"""Of the documents that are read: their structure is the same, see docs/json-schema-2.md."""

MAX_PAGE_CHARACTERS = 2**20
"""What is asked for of the page has 3 KB with one engine; the parser takes a quarter of a second for 1 MiB."""

MAX_ROWS = 1024
"""Of devices, engines, findings, gaps and sources each."""

MAX_LINES = 16 * MAX_ROWS
"""Of the ledger: sixteen parts of each device."""

MAX_EVIDENCE = 64
MAX_TEXT_CHARACTERS = 4096
MAX_WHOLE = 2**62

BUILD = "kvdiag_build_info"
USAGE, RUNNING, WAITING = "kvdiag_kv_usage_ratio", "kvdiag_requests_running", "kvdiag_requests_waiting"
UP, ERRORS, TOOK = "kvdiag_source_up", "kvdiag_source_errors_total", "kvdiag_sample_duration_seconds"
SAMPLED, DIAGNOSED = "kvdiag_sample_timestamp_seconds", "kvdiag_diagnosis_timestamp_seconds"
NAMES = (BUILD, USAGE, RUNNING, WAITING, UP, ERRORS, TOOK, SAMPLED, DIAGNOSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonReading:
    """What a daemon of some version knows. Its snapshot's diagnosis has no steps."""

    version: str
    snapshot: Snapshot
    lines: tuple[LedgerLine, ...]


class DaemonSource:
    """Reads one daemon. Its diagnosis is asked for again only when it has made another."""

    def __init__(self, http: HttpReader) -> None:
        """Read over `http`, whose base URL is the daemon's."""
        self._http = http
        self._diagnosis: Diagnosis | None = None
        self._diagnosed_seconds: float | None = None

    async def read(self) -> DaemonReading:
        """All that it knows now.

        Raises:
            Unreadable: it does not answer, does not let us in, or is no daemon of this kind; the reason says which.

        """
        try:
            page = _page(await self._get("/metrics", NAMES))
            document = _object(self._http.decode(await self._get("/api/v1/ledger")))
            made_seconds = _only(page, DIAGNOSED)
            if made_seconds is None or made_seconds != self._diagnosed_seconds:
                self._diagnosis = None if made_seconds is None else await self._judgement()
                self._diagnosed_seconds = None if self._diagnosis is None else made_seconds
            return parse(page, document, self._diagnosis)
        except (ValueError, TypeError) as error:
            # Constructors refuse with ValueError what cannot be; TypeError: a value of another kind than documented.
            raise Unreadable("failed", f"what it answers is not what `kvdiag serve` does: {error}") from error

    async def _judgement(self) -> Diagnosis | None:
        try:
            return parse_diagnosis(_object(self._http.decode(await self._get("/api/v1/diagnosis"))))
        except Unreadable as unreadable:
            if unreadable.status == 503:  # noqa: PLR2004 - as it answers while there is none
                return None
            raise

    async def _get(self, path: str, names: tuple[str, ...] = ()) -> Answer:
        try:
            return await self._http.get(path, [("name[]", name) for name in names])
        except Unreadable as unreadable:
            told = {
                401: "authentication required: pass --attach URL, --user and --password-file",
                403: "it does not let us in: is --user allowed to?",
                404: f"there is no {path}: is it `kvdiag serve`, and of this version?",
            }.get(unreadable.status or 0)
            if told is None:
                raise
            raise Unreadable("failed", told, status=unreadable.status) from unreadable


def parse(page: Page, document: Mapping[str, Any], diagnosis: Diagnosis | None) -> DaemonReading:
    """The reading of a metrics page and a document of the ledger, beside a diagnosis.

    Raises:
        ValueError: a value cannot be.

    """
    version = next((_text(one.labels.get("version")) for one in page.get(BUILD, ())), None)
    if version is None:
        raise ValueError("its page has no kvdiag_build_info")
    subject = _object(document.get("subject"))
    facts = Facts(
        url=_text(subject.get("url")),
        engine_name=_text(subject.get("engine")),
        engine_version=_text(subject.get("engine_version")),
        model=_text(subject.get("model")),
        max_model_len_tokens=_whole(subject.get("max_model_len_tokens")),
        pools=tuple(_pool(pool) for pool in _rows(subject, "pools")),
    )
    up = {one.labels.get("source", ""): one.value == 1.0 for one in page.get(UP, ())[:MAX_ROWS]}
    serving = up.get("engine", False)
    newest = Sample(
        at_seconds=_only(page, SAMPLED) or 0.0,
        engines=_engines(page) if serving else None,
        devices=tuple(_device(device) for device in _rows(document, "devices")) or None,
        gaps=_gaps(document),
    )
    snapshot = Snapshot(
        state="serving" if serving else "starting" if facts.engine_name is None else "lost",
        facts=facts,
        newest=newest,
        sources=tuple(
            SourceHealth(
                source=source[:MAX_TEXT_CHARACTERS],
                up=is_up,
                errors_total=_count(_of(page, ERRORS, source)) or 0,
                duration_seconds=_of(page, TOOK, source),
            )
            for source, is_up in sorted(up.items())
        ),
        diagnosis=diagnosis,
        diagnosed_seconds=None if diagnosis is None else _only(page, DIAGNOSED),
    )
    return DaemonReading(version=version, snapshot=snapshot, lines=_lines(document))


def parse_diagnosis(document: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis of its document, without its steps.

    Raises:
        ValueError: a value cannot be, or the document is of another version.

    """
    window = _object(document.get("window"))
    return Diagnosis(
        worst=_status(document.get("worst")),
        facts=Facts(),
        start_seconds=_number(window.get("start")) or 0.0,
        end_seconds=_number(window.get("end")) or 0.0,
        samples=_whole(window.get("samples")) or 0,
        steps=(),
        findings=tuple(_finding(finding) for finding in _rows(document, "findings")),
        ledger=_lines(document),
        gaps=_gaps(document),
    )


def _page(answer: Answer) -> Page:
    if len(answer.text) > MAX_PAGE_CHARACTERS:
        raise ValueError("its page is too large for the few series that were asked for")
    return parse_page(answer.text)


def _object(value: Any) -> Mapping[str, Any]:
    """A JSON object, of this version where it tells its version."""
    if not isinstance(value, dict):
        raise ValueError("something else stands where an object should")  # noqa: TRY004 - one kind of error for a bad answer
    version = value.get("schema_version", SCHEMA_VERSIONS[-1])
    if version not in SCHEMA_VERSIONS:
        raise ValueError(f"its documents have version {version!r:.20}, this kvdiag reads up to {SCHEMA_VERSIONS[-1]}")
    return value


def _rows(document: Mapping[str, Any], name: str, most: int = MAX_ROWS) -> Iterator[Mapping[str, Any]]:
    rows = document.get(name)
    if not isinstance(rows, list):
        raise ValueError(f"{name} is no list")  # noqa: TRY004
    yield from (_object(row) for row in rows[:most])


def _text(value: Any) -> str | None:
    return value[:MAX_TEXT_CHARACTERS] if isinstance(value, str) else None


def _must(value: Any) -> str:
    found = _text(value)
    if not found:
        raise ValueError("a name is missing")
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _whole(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and abs(value) <= MAX_WHOLE else None


def _size(value: Any) -> int:
    found = _whole(value)
    if found is None:
        raise ValueError("a size is missing")
    return found


def _count(value: float | None) -> int | None:
    return None if value is None or not value.is_integer() else _whole(int(value))


def _status(value: Any) -> Status:
    if value not in get_args(Status):
        raise ValueError(f"{value!r:.20} is no status")
    return cast("Status", value)


def _only(page: Page, name: str) -> float | None:
    found = next((one.value for one in page.get(name, ())), None)
    return None if found is None or not math.isfinite(found) else found


def _of(page: Page, name: str, source: str) -> float | None:
    found = next((one.value for one in page.get(name, ()) if one.labels.get("source") == source), None)
    return None if found is None or not math.isfinite(found) else found


def _engines(page: Page) -> tuple[Engine, ...]:
    told = {
        name: {one.engine[:MAX_TEXT_CHARACTERS]: one.value for one in page.get(name, ())[:MAX_ROWS]}
        for name in (USAGE, RUNNING, WAITING)
    }
    return tuple(
        Engine(
            engine=label,
            kv_usage_ratio=told[USAGE].get(label),
            requests_running=_count(told[RUNNING].get(label)),
            requests_waiting=_count(told[WAITING].get(label)),
        )
        for label in dict.fromkeys(label for values in told.values() for label in values)
    )


def _pool(values: Mapping[str, Any]) -> KvPool:
    usable = _size(values.get("usable_blocks"))
    return KvPool(
        engine=_must(values.get("engine")),
        block_tokens=_size(values.get("block_tokens")),
        total_blocks=_size(values.get("total_blocks")),
        usable_blocks=usable,
        usage_blocks=usable,
        capacity_tokens=_whole(values.get("capacity_tokens")),
        max_concurrency=_number(values.get("max_concurrency")),
        pool_bytes=_whole(values.get("pool_bytes")),
    )


def _device(values: Mapping[str, Any]) -> Device:
    total, free = _whole(values.get("total_bytes")), _whole(values.get("free_bytes"))
    return Device(
        uuid=_must(values.get("uuid")),
        index=_size(values.get("gpu")),
        name=_text(values.get("name")) or "",
        memory=None if total is None or free is None else Memory(total_bytes=total, free_bytes=free),
    )


def _lines(document: Mapping[str, Any]) -> tuple[LedgerLine, ...]:
    return tuple(_line(line) for line in _rows(document, "ledger", MAX_LINES))


def _line(values: Mapping[str, Any]) -> LedgerLine:
    source = values.get("source")
    if source not in get_args(Provenance):
        raise ValueError(f"{source!r:.20} is no source of a ledger's line")
    return LedgerLine(
        gpu=_whole(values.get("gpu")),
        uuid=_text(values.get("uuid")),
        component=_must(values.get("component")),
        bytes=_size(values.get("bytes")),
        provenance=cast("Provenance", source),
        detail=_text(values.get("detail")) or "",
    )


def _finding(values: Mapping[str, Any]) -> Finding:
    return Finding(
        id=_must(values.get("id")),
        status=_status(values.get("status")),
        summary=_text(values.get("summary")) or "",
        evidence=tuple(
            Evidence(
                name=_text(one.get("name")) or "",
                value=_text(one.get("value")) or _number(one.get("value")),
                unit=_text(one.get("unit")) or "",
                source=_text(one.get("source")) or "",
            )
            for one in _rows(values, "evidence", MAX_EVIDENCE)
        ),
        holder=_text(values.get("holder")),
        growth=_growth(values.get("growth")),
        imbalance=_imbalance(values.get("imbalance")),
        likely_cause=_text(values.get("likely_cause")),
        confirm=_text(values.get("confirm")),
        remedy=_text(values.get("remedy")),
        runbook=_text(values.get("runbook")),
    )


def _growth(values: object) -> GrowthFigures | None:
    """The growth of a finding; `None` of one that has none, or of a daemon that reports none."""
    if not isinstance(values, Mapping) or (rate := _number(values.get("bytes_per_second"))) is None:
        return None
    return GrowthFigures(
        bytes_per_second=rate,
        low_bytes_per_second=_number(values.get("low_bytes_per_second")),
        high_bytes_per_second=_number(values.get("high_bytes_per_second")),
        room_bytes=_whole(values.get("room_bytes")),
        exhaustion_seconds=_number(values.get("exhaustion_seconds")),
        exhaustion_low_seconds=_number(values.get("exhaustion_low_seconds")),
        exhaustion_high_seconds=_number(values.get("exhaustion_high_seconds")),
    )


def _imbalance(values: object) -> ImbalanceFigures | None:
    if not isinstance(values, Mapping):
        return None
    return ImbalanceFigures(
        excess_bytes=_whole(values.get("excess_bytes")), lost_tokens=_whole(values.get("lost_tokens"))
    )


def _gaps(document: Mapping[str, Any]) -> tuple[Gap, ...]:
    kinds = get_args(GapKind)
    return tuple(
        Gap(source=_must(one.get("source")), kind=one["kind"], reason=_text(one.get("reason")) or "")
        for one in _rows(document, "gaps")
        if one.get("kind") in kinds
    )
