"""Score the incidents as a Prometheus holds them: back-filled by promtool, judged by `kvdiag diagnose --prometheus`.

python -m tests.quality.bench.diagnosis_history     two pods for each incident: `series` with vLLM, DCGM and cAdvisor
alone, `own` with vLLM and kvdiag's own metrics

Prints the score, and every incident whose verdict differs from its trace's.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kvdiag.commands import main as kvdiag
from kvdiag.model import Facts, Timeline
from tests.integration.prometheus import openmetrics
from tests.integration.prometheus.histories import END_SECONDS, ending, exporter, server
from tests.integration.prometheus.openmetrics import Labels, line
from tests.integration.prometheus.server import PrometheusEnvError, programs, serving, write_history
from tests.quality.bench.diagnosis_score import BENIGN, calls, percent, recall
from tests.quality.corpus.incidents import INCIDENTS
from tests.quality.corpus.recording import standard_series
from tests.quality.corpus.score import Answer, Scored, Variant, answer, expectations, score, views_of

View = Literal["series", "own"]
VIEWS: tuple[View, ...] = ("series", "own")
SAME: dict[View, Variant] = {"series": "series", "own": "recorded"}
POD = "vllm-0"
NOBODY = Answer(worst="unknown", called={}, said={})


def main() -> int:
    """Write the history, have it judged, and print the score."""
    try:
        programs()
    except PrometheusEnvError as error:
        print_line(f"no Prometheus here: {error}")
        return 3
    with tempfile.TemporaryDirectory() as folder:
        storage = Path(folder) / "data"
        write_history((text for name in INCIDENTS for view in VIEWS for text in told(name, view)), storage)
        with serving(storage) as url:
            replicas = judged(url)
    table = expectations()
    for view in VIEWS:
        rows = [
            score(name, SAME[view], table[name], replicas.get(_namespace(name, view), NOBODY)) for name in INCIDENTS
        ]
        _print(view, rows)
    return 0


def _namespace(incident: str, view: View) -> str:
    return f"{incident}-{view}"


def told(incident: str, view: View) -> Iterator[str]:
    """The series of one incident's pod, up to the moment at which all of them end."""
    timeline, facts = INCIDENTS[incident].recording().play()
    if view == "series":
        timeline, facts = standard_series(timeline, facts)
    timeline = _renamed(ending(timeline), incident, view)
    namespace = _namespace(incident, view)
    page = server(namespace, POD)
    yield from openmetrics.vllm(timeline, facts, page)
    yield from _up(timeline, page)
    if view == "series":
        yield from openmetrics.dcgm(timeline, exporter(namespace, POD, node=f"node-{incident}"))
        yield from _container(timeline, facts, namespace)
    else:
        yield from openmetrics.kvdiag(timeline, {**server(namespace, POD, port=9450), "job": "kvdiag"})


def _renamed(timeline: Timeline, incident: str, view: View) -> Timeline:
    """Every incident has GPUs of its own."""

    def name(uuid: str) -> str:
        return f"{incident}-{view}-{uuid.removeprefix('GPU-')}"

    samples = []
    for sample in timeline.samples:
        devices = tuple(replace(one, uuid=f"GPU-{name(one.uuid)}") for one in sample.devices or ())
        torch = tuple(replace(one, device_uuid=name(one.device_uuid)) for one in sample.allocators or ())
        samples.append(replace(sample, devices=devices or None, allocators=torch or None))
    return Timeline(samples=tuple(samples))


def _up(timeline: Timeline, labels: Labels) -> Iterator[str]:
    for sample in timeline.samples:
        failed = any(gap.source == "engine" and gap.kind == "failed" for gap in sample.gaps)
        if sample.engines is not None or failed:
            yield line("up", labels, int(not failed), sample.at_seconds)


def _container(timeline: Timeline, facts: Facts, namespace: str) -> Iterator[str]:
    labels = {"namespace": namespace, "pod": POD, "container": "vllm", "instance": "node-1:10250", "job": "kubelet"}
    for sample in timeline.samples:
        for one in sample.host or ():
            yield line("container_memory_rss", labels, one.anonymous_bytes or 0, sample.at_seconds)
            yield line("container_memory_working_set_bytes", labels, one.resident_bytes, sample.at_seconds)
            if facts.host_limit_bytes is not None:
                yield line("container_spec_memory_limit_bytes", labels, facts.host_limit_bytes, sample.at_seconds)


def judged(url: str) -> dict[str, Answer]:
    """What the command line says of each pod, by namespace."""
    printed = io.BytesIO()
    out = io.TextIOWrapper(printed, encoding="utf-8")
    with contextlib.redirect_stdout(out):
        kvdiag(["diagnose", "--prometheus", url, "--end", str(END_SECONDS), "--window", "26h", "--output", "json"])
        out.flush()
    replicas: list[dict[str, Any]] = json.loads(printed.getvalue())["replicas"]
    found: dict[str, Answer] = {}
    for one in replicas:
        called = [each for each in one["findings"] if each["status"] in {"suspect", "fault"}]
        subject = one["subject"]
        # A GPU that no server is known of stands under the names that its exporter gives it; the worst comes first.
        name = subject.get("exported_namespace", subject.get("namespace", ""))
        before = found.get(name, NOBODY)
        found[name] = Answer(
            worst=before.worst if name in found else one["worst"],
            called={**{each["id"]: each["status"] for each in called}, **before.called},
            said={**{each["id"]: each["summary"] for each in called}, **before.said},
        )
    return found


def _print(view: View, rows: list[Scored]) -> None:
    marks = [one.mark for one in rows]
    share = recall([one for one in rows if one.expected.accept not in BENIGN])
    faults, wrong = calls(rows, "fault")
    counts = ", ".join(f"{marks.count(mark)} {mark}" for mark in ("right", "half", "missed", "honest"))
    print_line(f"{view}: {counts}; recall {percent(share)}; {faults} faults, {wrong:g} of them wrong")
    for one in rows:
        timeline, facts = INCIDENTS[one.incident].recording().play()
        by_trace = answer(views_of(timeline, facts)[one.variant])
        if by_trace.called != one.answer.called:
            print_line(f"  {one.incident}: {_said(one.answer)}; by the trace {_said(by_trace)}")


def _said(given: Answer) -> str:
    return ", ".join(f"{status} {name}" for name, status in given.called.items()) or given.worst


def print_line(text: str) -> None:
    """A line of the result."""
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
