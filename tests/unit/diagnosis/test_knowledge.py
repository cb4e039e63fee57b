import ast
import re
from pathlib import Path

import pytest

from kvdiag.diagnosis.growth.attribution import likely_and_other
from kvdiag.diagnosis.knowledge import KNOWLEDGE, TEXTS, entry_of, worded
from kvdiag.diagnosis.postmortem import postmortem
from kvdiag.engine_data import engine_data
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


FLAGS = engine_data("flags.json")
OVERRIDES = engine_data("knowledge.json")
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "tgi": "TGI", "lmdeploy": "LMDeploy", "trtllm": "TensorRT-LLM"}
METRICS = {"vllm": "vllm:", "sglang": "sglang:", "trtllm": "trtllm_", "tgi": "tgi_", "lmdeploy": "lmdeploy:"}
OURS = {
    "--isolation",
    "--soak",
    "--engine",
    "--runbook",
    "--postmortem",
    "--trace",
    "--log",
    "--other-api-key",
    "--url",
}
"""Options of kvdiag itself."""


def flags_in(text: str) -> set[str]:
    """Options and environment variables in an advice."""
    options = re.findall(r"(?<![\w-])--[a-z][\w-]*", text)
    return {*options, *re.findall(r"(?<!\w)[A-Z]{3,}_[A-Z_]{3,}(?!\w)", text)} - OURS


SHARED = {"lmdeploy": {"--max-batch-size"}, "ollama": {"GGML_CUDA_DISABLE_GRAPHS"}}
"""Names that an engine has in common with another one, and that its flags do not list."""


@pytest.mark.parametrize("engine", sorted(FLAGS))
@pytest.mark.parametrize("verdict", sorted(KNOWLEDGE))
def test_no_flag_of_another_engine_is_in_an_advice(verdict: str, engine: str) -> None:
    """A server refuses the flags of another engine: the on-call engineer would lose a restart."""
    entry = entry_of(verdict, engine)
    texts = " ".join(getattr(entry, name) for name in TEXTS)
    own = flags_in(" ".join(FLAGS[engine].values())) | SHARED.get(engine, set())
    others = set().union(*(flags_in(" ".join(flags.values())) for name, flags in FLAGS.items() if name != engine))
    assert set() == (flags_in(texts) & others) - own
    assert [] == [name for of, name in (*NAMES.items(), *METRICS.items()) if of != engine and name in texts]


def test_flags_in_rules_are_those_that_are_replaced() -> None:
    """A rule names a flag in the words of one engine, and every one of them has its setting."""
    ours = set().union(*(flags_in(flag) for flag in FLAGS["vllm"].values()))
    named = set()
    for path in (ROOT / "kvdiag" / "diagnosis").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [one for one in nodes if isinstance(one, ast.Constant) and id(one) not in docstrings]
        named |= set().union(*(flags_in(one.value) for one in texts if isinstance(one.value, str)))
    assert set() == named - ours - {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}


def test_texts_of_engines_are_of_verdicts_and_settings_that_exist() -> None:
    """An override has a verdict's id and an entry's field; a flag a setting of the first engine, or one it lacks."""
    assert [] == [
        (engine, verdict, field)
        for engine, verdicts in OVERRIDES.items()
        for verdict, texts in verdicts.items()
        for field in texts
        if verdict not in KNOWLEDGE or field not in TEXTS
    ]
    known = {*FLAGS["vllm"], "device_layers"}
    assert [] == [(name, one) for name, flags in FLAGS.items() for one in flags if one not in known]
    assert ["--max-num-seqs"] * 2 == [worded("--max-num-seqs", engine) for engine in ("vllm", None)]
    assert "the memory fraction" == worded("--gpu-memory-utilization", "llamacpp")
    assert "--max-running-requests, --max-num-seqs-x" == worded("--max-num-seqs, --max-num-seqs-x", "sglang")


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
