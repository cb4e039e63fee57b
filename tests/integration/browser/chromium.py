"""A real browser without a window: Debian's package, fetched and unpacked by a plain user, driven over a pipe.

By hand: `python -m tests.integration.browser.chromium FILE.html SHOT.png [WIDTH] [light|dark]` fetches it and takes a
picture.
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from tests.fixtures.once import cache, made_once

PACKAGE = "chromium-headless-shell"
INSTALLED = (PACKAGE, "chromium", "chromium-browser", "google-chrome")
FETCH_SECONDS = 300.0

MOVED = """
import os, sys
os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from 3 and writes answers to 4."""

Scheme = Literal["light", "dark"]


class BrowserEnvError(Exception):
    """A browser cannot be had on this machine; the message is one line that says why."""


def program() -> tuple[Path, dict[str, str]]:
    """Debian's package unpacked in the cache, else a browser that is installed; and the environment it needs.

    The tests' own copy comes first: it is the same program everywhere. An installed one may be another version, or a
    wrapper script that reads settings of its own.
    """
    try:
        root = made_once(cache() / "chromium", _fetch)
    except BrowserEnvError:
        installed = next((found for name in INSTALLED if (found := shutil.which(name))), None)
        if installed is None:
            raise
        return Path(installed), dict(os.environ)
    libraries = [str(path) for path in sorted((root / "usr" / "lib").glob("*-linux-gnu*"))]
    libraries += [str(path / "pulseaudio") for path in map(Path, libraries)]
    own = {"LD_LIBRARY_PATH": ":".join(libraries)}
    if (root / "etc" / "fonts").is_dir():  # where the machine has no fonts of its own
        own["FONTCONFIG_SYSROOT"] = str(root)
    return root / "usr" / "lib" / "chromium" / PACKAGE, os.environ | own


def _fetch(folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise BrowserEnvError("neither chromium nor apt-get and dpkg-deb are here")
    # Without root: nothing is installed, and package lists that are missing are fetched into a folder of our own.
    lists, archives = folder / "lists", folder / "archives"
    for one in (lists, archives):
        (one / "partial").mkdir(parents=True)
    own = ["-o", f"Dir::Cache::archives={archives}", "-o", "Debug::NoLocking=1"]
    fetch = ["apt-get", "-qq", "-y", "--no-install-recommends", "--download-only", *own]
    if _failure([*fetch, "install", PACKAGE], folder) is not None:
        listed = ["-o", f"Dir::State::Lists={lists}"]
        _run(["apt-get", "-qq", *own, *listed, "update"], folder)
        _run([*fetch, *listed, "install", PACKAGE], folder)
    for archive in archives.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(archive), str(folder)], folder)
    for left in (lists, archives):
        shutil.rmtree(left)


def _run(command: list[str], folder: Path) -> None:
    if (reason := _failure(command, folder)) is not None:
        raise BrowserEnvError(f"{Path(command[0]).name} failed: {reason[-300:]}")


def _failure(command: list[str], folder: Path) -> str | None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=FETCH_SECONDS)
    return None if done.returncode == 0 else " ".join((done.stderr or done.stdout).split())


@dataclass(kw_only=True)
class Browser:
    """A page of a browser that runs, by the DevTools protocol (NUL between messages on a pipe)."""

    commands: IO[bytes]
    answers: IO[bytes]
    session: str | None = None
    requested: list[str] = field(default_factory=list)
    """Addresses that the page has asked for since it was opened."""

    _number: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and wait for its answer; events in between are looked at and dropped."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        message: dict[str, Any] = json.loads(data)
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])
        return message

    def look(self, width: int, *, scheme: Scheme = "light", media: str = "screen", height: int = 900) -> None:
        """Be a screen, or paper, of that width."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def open(self, path: Path) -> None:
        """Open a file and wait until it is laid out."""
        self.requested.clear()
        self.call("Page.navigate", url=path.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, awaited where it is a promise."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def shot(self, clip: dict[str, float] | None = None) -> bytes:
        """A picture of the whole page, or of a rectangle of it, as PNG."""
        where = {"captureBeyondViewport": True} | ({} if clip is None else {"clip": {**clip, "scale": 1}})
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **where)["data"])

    def whole(self) -> bytes:
        """A picture of the whole page."""
        size = self.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        return self.shot({"x": 0, "y": 0, "width": size[0], "height": size[1]})


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser with one empty page."""
    path, environment = program()
    ends = [*os.pipe(), *os.pipe()]
    # What is moved to 3 and 4 must not stand there already.
    theirs = [fcntl.fcntl(ends[end], fcntl.F_DUPFD, 10) for end in (0, 3)]
    for end in (ends[0], ends[3]):
        os.close(end)
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(sys.executable, "-ISc", MOVED, *map(str, theirs), str(path)),
            # It opens files that the tests made, as root in a container too.
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-background-networking"),
        ]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=theirs,
            env=environment,
        ) as process:
            for end in theirs:
                os.close(end)
            try:
                with os.fdopen(ends[2], "rb") as answers, os.fdopen(ends[1], "wb") as commands:
                    browser = Browser(commands=commands, answers=answers)
                    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
                    attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
                    browser.session = attached["sessionId"]
                    browser.call("Page.enable")
                    browser.call("Network.enable")
                    yield browser
            finally:
                process.terminate()


if __name__ == "__main__":
    page, picture, *more = sys.argv[1:]
    with browsing() as opened:
        opened.look(int(more[0]) if more else 1280, scheme="dark" if more[1:] == ["dark"] else "light")
        opened.open(Path(page).resolve())
        Path(picture).write_bytes(opened.whole())
