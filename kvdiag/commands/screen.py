"""The terminal of a live view: its alternate screen, its keys and signals; given back as it was, after errors too."""

import asyncio
import contextlib
import os
import signal
import sys
import termios
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

QUIT = frozenset(b"qQ\x03\x04")
"""Also Ctrl-C and Ctrl-D, which arrive as keys where the terminal makes no signals of them."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOCAL_MODES, INPUT_MODES = 3, 0
"""Where tcgetattr(3) has them in Python's list."""


class Screen:
    """The terminal from `with` to its end, in a running event loop. `over` says that the user has had enough."""

    def __init__(self, console: Console) -> None:
        """Take nothing yet; `console` writes to the terminal."""
        self._console = console
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] | None = None
        self._live: Live | None = None
        self._woken = asyncio.Event()
        self.over = False

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in ENDING:
            loop.add_signal_handler(number, self._end)
        loop.add_signal_handler(signal.SIGWINCH, self._woken.set)
        try:
            self._enter()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        loop = asyncio.get_running_loop()
        for number in (*ENDING, signal.SIGWINCH, signal.SIGTSTP):
            loop.remove_signal_handler(number)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows, as they are now."""
        try:
            columns, rows = os.get_terminal_size(self._console.file.fileno())
        except OSError:
            columns, rows = 0, 0
        # A serial line reports no size.
        return columns or 80, rows or 24

    def draw(self, content: RenderableType) -> None:
        """Show this and nothing else. A terminal that has closed ends the view."""
        if self._live is None:
            return
        # Rich would keep to COLUMNS and LINES where a shell has exported them.
        self._console.size = self.size
        try:
            self._live.update(content, refresh=True)
        except OSError:
            self.over = True

    async def wait(self, seconds: float) -> None:
        """Until so much time is over, the size has changed, or the user wants to leave."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._woken.clear()

    def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            changed = termios.tcgetattr(self._keys)
            changed[LOCAL_MODES] &= ~(termios.ICANON | termios.ECHO)
            # Ctrl-S would block a write, and with it every signal handler.
            changed[INPUT_MODES] &= ~termios.IXON
            termios.tcsetattr(self._keys, termios.TCSANOW, changed)
            loop.add_reader(self._keys, self._read_keys)
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def _leave(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):
                live.stop()
        if self._keys is not None and self._before is not None:
            asyncio.get_running_loop().remove_reader(self._keys)
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSANOW, self._before)
            self._before = None

    def _end(self) -> None:
        self.over = True
        self._woken.set()

    def _read_keys(self) -> None:
        try:
            keys = os.read(self._keys, 64) if self._keys is not None else b""
        except OSError:
            keys = b""
        if not keys or QUIT & {*keys}:
            self._end()

    def _suspend(self) -> None:
        """Ctrl-Z: the shell gets its terminal back, and we ours once we are continued."""
        self._leave()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        self._enter()
        self._woken.set()
