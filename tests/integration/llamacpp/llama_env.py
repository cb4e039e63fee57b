"""What llama.cpp's server needs, made once and kept: a Python environment with the wheel, and the tiny models.

By hand: `python -m tests.integration.llamacpp.llama_env` builds both and prints where they are.
"""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.fixtures.once import cache, made_once

HERE = Path(__file__).parent
LOCK_FILE = HERE / "llamacpp-requirements.txt"
MODELS_PROGRAM = HERE / "tiny_gguf.py"


class LlamaEnvError(Exception):
    """llama.cpp's server cannot be had on this machine; the message is one line that says why."""


def llama_env() -> Path:
    """The environment's folder; about 10 s the first time, nothing after."""
    interpreter = f"{sys.version}{sysconfig.get_platform()}{sys.base_prefix}".encode()
    folder = cache() / f"llamacpp-{_digest(LOCK_FILE.read_bytes(), interpreter)}"
    return made_once(folder, _build)


def models(env: Path) -> Path:
    """The folder that holds one GGUF file for each architecture."""
    folder = cache() / f"gguf-{_digest(MODELS_PROGRAM.read_bytes(), LOCK_FILE.read_bytes())}"

    def build(target: Path) -> None:
        target.mkdir()
        _run(str(env / "bin" / "python"), str(MODELS_PROGRAM), str(target))

    return made_once(folder, build)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _build(folder: Path) -> None:
    uv = str(Path(sys.executable).with_name("uv"))
    _run(uv, "venv", "--quiet", "--python", sys.executable, str(folder))
    python = str(folder / "bin" / "python")
    _run(uv, "pip", "install", "--quiet", "--python", python, "--require-hashes", "--requirements", str(LOCK_FILE))


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise LlamaEnvError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split())
        raise LlamaEnvError(f"{Path(command[0]).name} {command[1]} failed: {reason[-400:]}")


if __name__ == "__main__":
    built = llama_env()
    print(built, models(built), sep="\n")  # noqa: T201
