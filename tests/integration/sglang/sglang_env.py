"""What a real SGLang needs, made once and kept: a Python environment with SGLang 0.5.23 and declared kernels.

By hand: `python -m tests.integration.sglang.sglang_env` builds it and prints where it is.
"""

from pathlib import Path

from tests.integration.vllm.engine_env import python_env

HERE = Path(__file__).parent
LOCK_FILE = HERE / "sglang-requirements.txt"
SHIM = HERE / "sglang_cpu_shim.py"


def sglang_env() -> Path:
    """The environment's folder; about a minute the first time, nothing after."""
    return python_env("sglang", LOCK_FILE, _add_shim, SHIM.read_bytes())


def _add_shim(site_packages: Path) -> None:
    """Have each Python of the environment import the shim before anything else."""
    (site_packages / SHIM.name).write_bytes(SHIM.read_bytes())
    (site_packages / f"{SHIM.stem}.pth").write_text(f"import {SHIM.stem}\n")


if __name__ == "__main__":
    print(sglang_env())  # noqa: T201
