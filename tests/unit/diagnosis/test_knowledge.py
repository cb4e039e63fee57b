from pathlib import Path

import pytest

from kvdiag.diagnosis.growth.attribution import likely_and_other
from kvdiag.diagnosis.knowledge import KNOWLEDGE, worded
from kvdiag.diagnosis.postmortem import postmortem
from kvdiag.engine_memory import advice_words
from kvdiag.engines import engine_of_log, vllm
from kvdiag.feeds.postmortem_inputs import gather

ROOT = Path(__file__).parents[3]
TORCH, BESIDE = "leak.device_torch", "leak.device_non_torch"


@pytest.mark.parametrize("verdict", sorted(KNOWLEDGE))
def test_every_verdict_has_its_own_runbook(verdict: str) -> None:
    """The page that a finding points to is there, and is that verdict's."""
    entry = KNOWLEDGE[verdict]
    assert f"alerts/runbooks/{verdict}.md" == entry.runbook
    assert (ROOT / entry.runbook).is_file()
    assert all((entry.symptom, entry.likely_cause, entry.confirm, entry.remedy))


def test_every_runbook_of_a_verdict_has_an_entry() -> None:
    """There is exactly one runbook for each verdict."""
    families = {verdict.partition(".")[0] for verdict in KNOWLEDGE}
    pages = {page.stem for page in (ROOT / "alerts" / "runbooks").glob("*.*.md")}
    assert {page for page in pages if page.partition(".")[0] in families} == set(KNOWLEDGE)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("vllm", (TORCH, BESIDE)),
        ("sglang", (TORCH, BESIDE)),
        ("llama.cpp", (BESIDE, TORCH)),
        (None, (BESIDE, TORCH)),
    ],
)
def test_growth_that_nvml_alone_sees_is_named_by_the_engine(engine: str | None, expected: tuple[str, str]) -> None:
    """The likelier verdict is torch's for engines that allocate through torch, and outside torch for any other."""
    assert expected == likely_and_other(engine)


SGLANG_CAPTURE = """  File "/opt/sglang/srt/model_executor/cuda_graph_runner.py", line 269, in __init__
Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 7 has a total capacity of \
95.00 GiB of which 292.31 MiB is free. Process 1 has 94.70 GiB memory in use. Of the allocated memory 88.10 GiB is \
allocated by PyTorch, and 302.00 MiB is reserved by PyTorch but unallocated.
"""


def test_advice_names_the_flags_of_the_engine_that_failed(tmp_path: Path) -> None:
    """SGLang refuses vLLM's flags: a remedy with them costs the person on call a restart."""
    log = tmp_path / "sglang.log"
    log.write_text(SGLANG_CAPTURE)
    found = postmortem(gather([log]))
    capture = next(one for one in found.findings if one.id == "spike.graph_capture")
    assert ("sglang", "fault") == (found.facts.engine_name, capture.status)
    assert "Lower --mem-fraction-static by 0.0" in (capture.remedy or "")
    assert "--disable-cuda-graph" in (capture.confirm or "")
    advice = " ".join(text for one in found.findings for text in (one.likely_cause, one.confirm, one.remedy) if text)
    assert [] == [flag for flag in vllm.ENGINE.flags.values() if f"{flag} " in advice]


def test_words_of_other_engines_are_those_of_the_advice() -> None:
    """What is replaced stands in some advice, whole before its parts; an engine that is not known gets vLLM's words."""
    sources = [path.read_text() for path in (ROOT / "kvdiag").rglob("*.py")]
    sources += [(ROOT / "kvdiag" / "engines" / "vllm" / "flags.json").read_text()]
    sources += [text for entry in KNOWLEDGE.values() for text in (entry.likely_cause, entry.confirm, entry.remedy)]
    for memory in (ROOT / "kvdiag" / "engines").glob("*/memory.json"):
        names = list(advice_words(memory.parent.name))
        assert [] == [name for name in names if not any(name in source for source in sources)]
        assert [] == [(one, other) for place, one in enumerate(names) for other in names[place + 1 :] if one in other]
    assert ["--max-num-seqs"] * 2 == [worded("--max-num-seqs", engine) for engine in ("vllm", None)]


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ('File "/opt/x.py", line 1, in forward_extend', "sglang"),
        ('File "/opt/x.py", line 1, in event_loop_overlap', "sglang"),
        ("python -m sglang.launch_server --model-path x", "sglang"),
        ("set --mem-fraction-static to a smaller value", "sglang"),
        ('File "/opt/vllm/v1/worker/gpu_worker.py", line 1, in execute_model', "vllm"),
        ("benchmarked against sglang", None),
    ],
)
def test_an_engine_is_recognised_by_what_stands_in_its_log(line: str, engine: str | None) -> None:
    """By its files, flags and functions; a mention of it is none."""
    assert engine == engine_of_log(line)
