"""What `kvdiag fit` prints, one golden file for each kind of answer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvdiag.commands import main
from kvdiag.kv.layout.layers import LayerKind
from kvdiag.outputs.terminal.cells import MEMORY
from tests.unit.commands.fit.fitting import GIB

LOGS = Path(__file__).parents[3] / "fixtures" / "logs"
GPU = ("--no-profile", "--gpu")
BLOCKS = ("--num-gpu-blocks-override",)
POOL = ("--tp", "8", "--kv-pool-bytes", str(10 * GIB), "--context", "8192")
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fits": (0, ("llama_70b", *GPU, "a100", "--tp", "8", "--context", "8192", "--concurrency", "32")),
    "tight": (1, ("qwen3-8b", *GPU, "l4", "--context", "9400", "--concurrency", "3")),
    "does_not_fit": (2, ("llama_70b", *GPU, "a100", "--context", "8192")),
    "few_blocks": (2, ("llama-3-8b", *GPU, "h100", *BLOCKS, "256", "--context", "2048", "--concurrency", "8")),
    "too_many_blocks": (2, ("llama-3-8b", *GPU, "h100", *BLOCKS, "90000000", "--context", "2048")),
    "generic": (0, ("llama_70b", *GPU, "h100", "--tp", "4", "--context", "8192", "--engine", "generic")),
    "grid": (0, ("llama-3.1-8b", *GPU, "h100", "--context", "8192", "--grid")),
    "stages": (0, ("nemotron-nano-9b-v2", *GPU, "80GB", "--pp", "2", "--context", "8192")),
    "pool": (0, ("llama_70b", *POOL)),
    "pool_of_windows": (0, ("gemma-3-27b", *POOL)),
    "sglang": (0, ("llama_70b", *GPU[1:], "h100", "--tp", "4", "--context", "8192", "--engine", "sglang")),
    "sglang_fraction": (
        2,
        ("llama-3.1-8b", *GPU[1:], "a10", "--context", "8192", "--engine", "sglang", "--mem-fraction-static", "0.6"),
    ),
    "llamacpp": (2, ("gemma-3-27b", "--engine", "llamacpp", *GPU[1:], "a100", "-c", "524288", "-np", "4")),
    "trtllm": (0, ("llama_70b", "--engine", "trtllm", *GPU[1:], "h100", "--tp", "4", "--context", "8192")),
    "tgi": (0, ("llama-3.1-8b", "--engine", "tgi", *GPU[1:], "a10", "--context", "8192", "--attention", "paged")),
    "lmdeploy": (0, ("llama-3.1-8b", "--engine", "lmdeploy", *GPU[1:], "a10", "--context", "8192")),
    "drift": (1, ("llama-3.1-8b", "--no-profile", "--from-log", "vllm-0.32.0-V1-tp2-composed.log", "--gpu", "h100")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_printed(
    kind: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    golden: Callable[[str, str], None],
) -> None:
    """The answer first, within 80 columns."""
    monkeypatch.chdir(LOGS)
    code, arguments = KINDS[kind]

    actual = main(["fit", *arguments])
    printed = capsys.readouterr()

    assert (code, "") == (actual, printed.err)
    assert not [line for line in printed.out.splitlines() if len(line) > 80]
    golden(f"fit/{kind}.txt", printed.out)


def test_kinds_of_layer_are_words() -> None:
    """No identifier is printed for one."""
    assert [] == [kind for kind in LayerKind if "_" in MEMORY["layers"].get(kind, kind)]
