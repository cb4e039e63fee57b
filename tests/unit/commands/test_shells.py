"""What shells and manuals get from the commands' own help: completion, and the manual page."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvdiag.commands import COMMANDS
from kvdiag.commands.completion import SHELLS
from tests.fixtures.require import require
from tests.unit.commands.bad_input.refusals import call

KVDIAG = Path(sys.executable).parent


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words, by the printed script."""
    script = 'eval "$(kvdiag completion bash)"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvdiag_completion kvdiag; '
    done = subprocess.run(
        ["bash", "-c", script + 'printf "%s\n" "${COMPREPLY[@]}"', "bash", "kvdiag", *words],
        env={**os.environ, "PATH": f"{KVDIAG}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "" == done.stderr
    return done.stdout.split()


def test_bash_completes_commands() -> None:
    """The commands that begin so."""
    assert [name for name in COMMANDS if name.startswith("d")] == completed("d")


def test_bash_completes_options() -> None:
    """Of the command that stands before."""
    assert ["--soak"] == completed("run", "--soa")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_a_script(shell: str) -> None:
    """Which asks kvdiag under the name of its own variable."""
    printed = call("completion", shell)
    assert (0, "") == (printed.code, printed.stderr)
    assert "_KVDIAG_COMPLETE" in printed.stdout


def test_manual_page_is_clean() -> None:
    """The formatter has nothing to warn of, and every command is in the page."""
    groff = shutil.which("groff")
    require(groff is not None, "groff")
    page = call("man").stdout
    done = subprocess.run(
        [str(groff), "-man", "-Tascii", "-ww", "-rLL=200n", "-P-cbou"],
        input=page,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "" == done.stderr
    assert [] == [name for name in COMMANDS if f"kvdiag {name}" not in done.stdout]
    assert "--check-fix FLAGS" in done.stdout
