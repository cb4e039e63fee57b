"""vLLM's stored startup logs, lines of them, and figures as they print them."""

from pathlib import Path

from kvdiag.engines.vllm.startup_log import parse_log
from kvdiag.kv.calibration.engine_report import GIB, PrintedSize, RankReport

LOGS = Path(__file__).parents[3] / "fixtures" / "logs"


def gib(value: float, slack: float = 0.005) -> PrintedSize:
    """A figure as printed with two decimals."""
    return PrintedSize(nominal_bytes=round(value * GIB), slack_bytes=round(slack * GIB))


def rank(line: str) -> RankReport:
    """The one rank that a line reports."""
    report = parse_log(line)
    assert 1 == len(report.ranks)
    return report.ranks[0]


AUDIT = (
    "model weights take 12.55GiB; non_torch_memory takes 0.16GiB; PyTorch activation peak memory takes 2.38GiB; "
    "the rest of the memory reserved for KV Cache is 56.18GiB."
)
USAGE = "Free memory on device (94.06/94.97 GiB) on startup. Desired GPU memory utilization is (0.92, 87.37 GiB). "
CONSUMED = (
    f"{USAGE}Actual usage is 52.92 GiB for consumed memory (weights + non-torch), 2.32 GiB for peak activation, and "
    "1.51 GiB for CUDAGraph memory. Current kv cache memory in use is 32.13 GiB."
)
