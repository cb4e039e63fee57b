"""What shells and manuals get from the commands' own help: completion, and the manual page."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvdiag.commands import COMMANDS
from kvdiag.commands.completion import SHELLS
from tests.fixtures.debian import NoPackageError, unpack
from tests.fixtures.once import cache, made_once
from tests.fixtures.require import require
from tests.fixtures.terminal import terminal
from tests.unit.commands.bad_input.refusals import call

KVDIAG = Path(sys.executable).parent
PATHS = f"{KVDIAG}:{os.environ['PATH']}"

PACKAGES = ("zsh", "zsh-common", "fish", "fish-common", "libpcre2-32-0")
"""Debian's shells, with the library that a bare system lacks."""


@pytest.fixture(scope="module")
def shells() -> Path:
    """The root of a tree with zsh and fish in it; 8 MB the first time."""
    try:
        return made_once(cache() / "shells", lambda folder: (unpack(PACKAGES, folder), None)[1]) / "unpacked"
    except NoPackageError as error:
        require(ok=False, what=f"zsh and fish ({error})")
        raise


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words, by the printed script."""
    script = 'eval "$(kvdiag completion bash)"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvdiag_completion kvdiag; '
    done = subprocess.run(
        ["bash", "-c", script + 'printf "%s\n" "${COMPREPLY[@]}"', "bash", "kvdiag", *words],
        env={**os.environ, "PATH": PATHS},
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


def test_fish_completes_commands_with_what_they_do(shells: Path, tmp_path: Path) -> None:
    """Those that begin so, each with its help, and the option of a command."""
    script = "kvdiag completion fish | source; complete -C 'kvdiag d'; complete -C 'kvdiag run --soa'"
    libraries = next(shells.glob("usr/lib/**/libpcre2-32.so.*")).parent
    done = subprocess.run(
        [shells / "usr" / "bin" / "fish", "--no-config", "-c", script],
        env={**os.environ, "PATH": PATHS, "HOME": str(tmp_path), "LD_LIBRARY_PATH": str(libraries)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [*(name for name in COMMANDS if name.startswith("d")), "--soak"] == [name for name, _ in lines]
    assert all(help_ for _, help_ in lines)


def test_zsh_completes_options(shells: Path, tmp_path: Path) -> None:
    """At the tab key, in a terminal."""
    modules, functions = shells / "usr" / "lib" / "x86_64-linux-gnu" / "zsh", shells / "usr" / "share" / "zsh"
    (tmp_path / ".zshrc").write_text(
        f"module_path=({modules}/*(/))\nfpath=({functions}/functions/**/*(/))\nPS1='zsh> '\n"
        'autoload -Uz compinit && compinit -u -D\neval "$(kvdiag completion zsh)"\n',
        encoding="utf-8",
    )
    with terminal(columns=100, PATH=PATHS, ZDOTDIR=str(tmp_path)) as window:
        window.type(f"exec {shells / 'bin' / 'zsh'} -i")
        window.press("Enter")
        assert window.comes_to(lambda: window.shows("zsh>"))
        window.type("kvdiag run --soa")
        window.press("Tab")
        assert window.comes_to(lambda: window.shows("kvdiag run --soak"))


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
