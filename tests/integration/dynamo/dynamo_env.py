"""What Dynamo needs, made once and kept: a Python environment with its front end and its simulated workers.

By hand: `python -m tests.integration.dynamo.dynamo_env` builds it and prints where it is. The lock leaves out
`aisimulate`, which is empty on PyPI: `uv pip compile --generate-hashes --override` with `aisimulate; python_version <
'3'`.
"""

import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.fixtures.once import cache, made_once

HERE = Path(__file__).parent
LOCK_FILE = HERE / "dynamo-requirements.txt"


class DynamoEnvError(Exception):
    """Dynamo cannot be had on this machine; the message is one line that says why."""


def dynamo_env() -> Path:
    """The environment's folder; half a minute the first time, nothing after."""
    interpreter = f"{sys.version}{sysconfig.get_platform()}{sys.base_prefix}".encode()
    digest = hashlib.sha256(LOCK_FILE.read_bytes() + interpreter).hexdigest()[:12]
    return made_once(cache() / f"dynamo-{digest}", _build)


def _build(folder: Path) -> None:
    uv = str(Path(sys.executable).with_name("uv"))
    run(uv, "venv", "--quiet", "--python", sys.executable, str(folder))
    install = (uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--requirements", str(LOCK_FILE))
    run(*install, "--python", str(folder / "bin" / "python"))


def run(*command: str) -> str:
    """What a command printed; DynamoEnvError if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise DynamoEnvError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split())
        raise DynamoEnvError(f"{Path(command[0]).name} failed: {reason[-400:]}")
    return done.stdout


if __name__ == "__main__":
    print(dynamo_env())  # noqa: T201
