"""`import kvdiag`: the same verdicts as the commands', as values, tables and pictures."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import kvdiag
from kvdiag.api.history import MAX_COLUMNS
from kvdiag.commands import main
from kvdiag.model import Facts, Gap, Timeline
from kvdiag.outputs.fleet_results import Judged
from kvdiag.testing import assert_no_leak
from tests.builders.values import engine

ANY: Any = kvdiag
"""Without its types."""

TRACES = Path(__file__).parents[2] / "golden" / "traces"


@pytest.fixture
def leak() -> kvdiag.History:
    """A recorded run on a server that keeps blocks."""
    return kvdiag.load(TRACES / "vllm-0.32.0-soak-leak.jsonl.gz")


def test_every_public_name_is_there() -> None:
    """The list is what `from kvdiag import *` gives."""
    assert [] == [name for name in kvdiag.__all__ if not hasattr(kvdiag, name)]


def test_editors_get_names_and_types() -> None:
    """A notebook completes the public names and no others, before their first use too; checkers read the types."""
    assert sorted(kvdiag.__all__) == dir(kvdiag)
    assert (files("kvdiag") / "py.typed").is_file()


def test_importing_imports_nothing_else() -> None:
    """Nothing but the standard library, until a name is used."""
    code = "import sys; before = set(sys.modules); import kvdiag; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert [] == sorted({name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names - {"kvdiag"})
    assert ["kvdiag"] == [name for name in done.stdout.split() if name.startswith("kvdiag")]


def test_diagnosis_is_the_commands(leak: kvdiag.History, capsys: pytest.CaptureFixture[str]) -> None:
    """Status, text and JSON document."""
    found = kvdiag.diagnose(leak)
    assert 2 == main(["diagnose", leak.name])
    assert capsys.readouterr().out.split() == str(found).split()
    assert ("fault", "fault") == (found.status, found.finding("leak.kv_blocks").status)
    assert [one.id for one in found.problems] == [
        one["id"] for one in found.document()["findings"] if one["status"] in ("fault", "suspect")
    ]


def test_notebook_gets_a_page_in_a_frame(leak: kvdiag.History) -> None:
    """Whole, without scripts, and apart from the notebook's own styles."""
    for shown in (kvdiag.diagnose(leak), leak, kvdiag.plot(leak)):
        html = shown._repr_html_()
        assert html.startswith("<iframe sandbox srcdoc=")
        assert "&lt;script" not in html
        assert ["<iframe", "</iframe"] == re.findall(r"<[/\w]+", html)


def test_a_prompt_shows_a_line(leak: kvdiag.History) -> None:
    """And not every sample of a day."""
    diagnosis = kvdiag.diagnose(leak)
    shown = [*map(repr, (leak, diagnosis, kvdiag.plot(leak), kvdiag.fit("llama_70b", gpu="h100", tp=4)))]
    assert max(map(len, shown)) < 300
    assert leak.name in shown[0]
    assert diagnosis.summary in shown[1]
    assert "<Fit: fits>" == shown[3]


def test_pandas_holds_every_sample(leak: kvdiag.History) -> None:
    """Times in UTC, a column each figure and owner, and what was not reported as missing."""
    frame = leak.to_pandas()
    assert len(leak.timeline.samples) == len(frame)
    assert leak.timeline.samples[0].at_seconds == pytest.approx(frame.index[0].timestamp(), abs=1e-3)
    expected = [one.engines[0].kv_usage_ratio for one in leak.timeline.samples if one.engines]
    assert expected == frame["kv_usage_ratio"]["0"].dropna().to_list()


def test_polars_holds_the_same(leak: kvdiag.History) -> None:
    """As pandas, with flat names."""
    frame, other = leak.to_polars(), leak.to_pandas()
    assert other["kv_usage_ratio"]["0"].dropna().to_list() == frame["kv_usage_ratio[0]"].drop_nulls().to_list()
    assert other.index[0].timestamp() == pytest.approx(frame["time"][0].timestamp(), abs=1e-3)


def test_a_server_that_renames_its_engines_is_no_table(leak: kvdiag.History) -> None:
    """Each name would be a column."""
    (first, *_) = leak.timeline.samples
    samples = tuple(
        replace(first, at_seconds=float(at), engines=(replace(engine(), engine=str(at)),)) for at in range(MAX_COLUMNS)
    )
    with pytest.raises(kvdiag.KvdiagError, match="too many"):
        replace(leak, timeline=Timeline(samples=samples)).columns()


def test_a_package_that_is_missing_is_named(leak: kvdiag.History, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the way to have it."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(kvdiag.KvdiagError, match=r"kvdiag\[pandas\]"):
        leak.to_pandas()


def test_fit_is_the_plan_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The same document, and typed figures."""
    found = kvdiag.fit("llama_70b", gpu="a100", tp=4, context=8192, concurrency=64, no_profile=True)
    code = main(
        [
            "fit",
            "llama_70b",
            "--gpu",
            "a100",
            "--tp",
            "4",
            "--context",
            "8192",
            "--concurrency",
            "64",
            "--no-profile",
            "--output",
            "json",
        ]
    )
    assert (code != 2) == found.fits
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.document()))


@pytest.mark.parametrize(
    "call",
    [
        lambda: kvdiag.load("/nowhere"),
        lambda: kvdiag.fit("llama_70b", gpu="a100", colour="red"),
        lambda: kvdiag.fit("llama_70b", gpu="a100", engine="sglang"),
        lambda: kvdiag.fit("llama_70b", gpu="a100", max_num_batched_tokens=1, max_in_flight_tokens=1),
        lambda: kvdiag.fit("llama_70b", gpu="a100", engine="lamacpp"),
        lambda: kvdiag.fit("llama_70b", gpu="a100", platform="toaster"),
        lambda: kvdiag.fit("llama_70b", gpu="a100", tp=1.5),
        lambda: kvdiag.fit("llama_70b", gpu="80"),
        lambda: kvdiag.fit("llama_70b", gpu="a100", from_log="/nowhere"),
        lambda: kvdiag.fit("llama_70b", gpu="a100", offline="yes"),
        lambda: kvdiag.read_prometheus("http://127.0.0.1:9", colour="red"),
        lambda: kvdiag.read_prometheus("http://127.0.0.1:9", prometheus="http://127.0.0.1:9"),
        lambda: kvdiag.read_prometheus("http://127.0.0.1:9", window="soon"),
        lambda: kvdiag.read_prometheus("http://127.0.0.1:9", timeout=0),
        lambda: kvdiag.read_prometheus("http://127.0.0.1:9", password_file="/nowhere", user="a"),  # noqa: S106 - a file
        lambda: kvdiag.read_prometheus("http://127.0.0.1:9", headers={"X-Scope-OrgID": "a"}),
        lambda: kvdiag.diagnose(kvdiag.load(TRACES / "vllm-0.32.0-starved.jsonl.gz"), reserved_gap_bytes=-1),
        lambda: kvdiag.read_prometheus("http://127.0.0.1:9", password="secret"),  # noqa: S106 - of no user
        lambda: kvdiag.read_prometheus("http://127.0.0.1:9", start=datetime.min),  # noqa: DTZ901 - no time at all
        lambda: kvdiag.fit("llama_70b", gpu="a100", lengths=[1, 2]),
        lambda: kvdiag.fit("llama_70b", gpu="a100", tp=b"1"),
        lambda: kvdiag.load("x" * 5000),
        lambda: kvdiag.load("a\0b"),
        lambda: kvdiag.load("\ud800"),
        lambda: assert_no_leak("http://127.0.0.1:9", requests=0),
        lambda: assert_no_leak("http://127.0.0.1:9", requests=10**9),
    ],
)
def test_what_cannot_be_done_is_one_kind_of_error(call: object) -> None:
    """With its cause."""
    assert callable(call)
    with pytest.raises(kvdiag.KvdiagError):
        call()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("history", lambda _: ANY.diagnose("x")),
        ("history", lambda leak: ANY.diagnose([leak])),
        ("history", lambda leak: ANY.plot(ANY.diagnose(leak))),
        ("'x'", lambda leak: ANY.diagnose(leak, x=1)),
        ("reserved_gap_bytes", lambda leak: ANY.diagnose(leak, reserved_gap_bytes=True)),
        ("reserved_gap_bytes", lambda leak: ANY.diagnose(leak, reserved_gap_bytes="1GiB")),
        ("path", lambda _: ANY.load(None)),
        ("gpu", lambda _: ANY.fit("llama_70b")),
        ("model", lambda _: ANY.fit(70, gpu="a100")),
        ("lengths", lambda _: ANY.fit("llama_70b", gpu="a100", lengths=[1, 2])),
        ("url", lambda _: ANY.read_prometheus(None)),
        ("window", lambda _: ANY.read_prometheus("http://127.0.0.1:9", window=24)),
        ("timeout", lambda _: ANY.read_prometheus("http://127.0.0.1:9", timeout={})),
        ("requests", lambda _: ANY.testing.assert_no_leak("http://127.0.0.1:9", requests="200")),
    ],
)
def test_a_wrong_type_is_named(leak: kvdiag.History, name: str, call: Callable[[kvdiag.History], object]) -> None:
    """With the argument, in one line."""
    with pytest.raises(kvdiag.KvdiagError, match=name) as raised:
        call(leak)
    assert "\n" not in str(raised.value)


def test_a_history_without_samples_has_one_reason(leak: kvdiag.History) -> None:
    """That of the read, as the table of replicas and each verdict have it; not what the engine would have to report."""
    missing = [Gap("engine", "absent", "no pool"), Gap("prometheus", "absent", "no sample")]
    for gaps, reason in ((missing, "no sample"), ([*missing, Gap("prometheus", "failed", "not read")], "not read")):
        empty = replace(leak, timeline=Timeline(samples=()), facts=Facts(gaps=tuple(gaps)))
        found = kvdiag.diagnose(empty)
        row = Judged(key="a", subject=(("pod", "a"),), diagnosis=found.judged)
        assert [reason] * 3 == [found.summary, row.summary, found.finding("leak.kv_blocks").summary]
        assert "unknown" == found.status


def test_values_are_read_as_the_command_reads_them() -> None:
    """Text with a suffix, or a number."""
    typed, given = (
        kvdiag.fit("llama_70b", gpu="a100", tp=tp, context=context) for tp, context in (("4", "8K"), (4, 8192))
    )
    assert typed.document() == given.document()


def test_prometheus_is_read_where_a_loop_runs() -> None:
    """As in every notebook."""

    async def cell() -> None:
        kvdiag.read_prometheus("http://127.0.0.1:9")

    with pytest.raises(kvdiag.KvdiagError, match="cannot connect"):
        asyncio.run(cell())
