"""Parts of every terminal output: safe text, headings, tables of names and values, wrapped cells, bar characters."""

import json
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvdiag.outputs.presentation import printable

MEMORY: dict[str, dict[str, Any]] = json.loads(pkgutil.get_data(__package__, "kinds.json") or b"")
"""Titles, characters and colours of memory: by the ledger's component and a budget's field; and layers in words."""

MARKS = 3
"""Combining marks on a character that are looked through for the end of a line; text with more breaks early."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of memory: its title, its character, the one for a terminal of ASCII alone, its colour."""

    title: str
    mark: str
    ascii_mark: str
    style: str = ""


def marked(kind: Kind, *, ascii_only: bool) -> str:
    """The character of a kind."""
    return kind.ascii_mark if ascii_only else kind.mark


def wrapped(text: Text, columns: int, most: int, *, indent: int = 0) -> list[Text]:
    """The text over at most `most` lines, broken at spaces, the last one cut; later lines are indented."""
    breaks = list(islice(_breaks(text.plain, columns, columns - indent), most + 1))
    found = [
        Text(" " * (indent if place else 0)).append(text[start:end].copy())
        for place, (start, end) in enumerate(breaks[:most])
    ]
    if len(breaks) > most:
        # One character more than fits: the frame puts the mark of a cut there.
        found[-1] = Text(" " * (indent if most > 1 else 0)).append(text[breaks[most - 1][0] :][: 2 * columns])
    return found


def _breaks(content: str, first: int, later: int) -> Iterator[tuple[int, int]]:
    """Where each line begins and ends, in cells; a word longer than a line is cut anywhere."""
    start, room = 0, max(first, 1)
    while start < len(content) or start == 0:
        # Characters without a width of their own come along, some of them on each other.
        rest = content[start : start + MARKS * (room + 1)]
        if cell_len(rest) <= room:
            end = start + len(rest)
        else:
            fits = len(chop_cells(rest, room)[0]) or 1
            space = rest.rfind(" ", 0, fits + 1)
            end = start + (space if space > 0 else fits)
        yield start, end
        start = max(end, 1)
        while start < len(content) and content[start] == " ":
            start += 1
        room = max(later, 1)


def sides(left: Text, right: Text, width: int) -> Text:
    """Two texts at the ends of a line; the left one is cut if both do not fit."""
    if cell_len(right.plain) >= width:
        return right
    room = width - right.cell_len - 2
    kept = left.copy()
    kept.truncate(max(room, 0), pad=True)
    return Text.assemble(kept, "  ", right)


def heading(text: str) -> RenderableType:
    """The line above a part, after an empty one."""
    return Padding(plain(text, "bold"), (1, 0, 0, 0))


def plain(content: str, style: str = "") -> Text:
    """Text as it may appear on a terminal: no markup, and no character that moves a cursor or reverses the line."""
    return Text(printable(content), style=style)


def grid(rows: Iterable[tuple[str | Text, str | Text]]) -> Table:
    """A table of names and values; a name that is no `Text` is dim, texts from outside are made safe."""
    table = Table(box=None, padding=(0, 0, 0, 2), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(
            plain(name, "dim") if isinstance(name, str) else name, plain(value) if isinstance(value, str) else value
        )
    return table


def columns(*titles: str, header: bool = True) -> Table:
    """A table without lines. A title that starts with `>` is of numbers, right-aligned; `=` does not wrap."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=header, header_style="dim")
    for title in titles:
        kept = title[:1] in (">", "=")
        table.add_column(
            title[1:] if kept else title,
            justify="right" if title[:1] == ">" else "left",
            no_wrap=kept,
            overflow="fold",
        )
    return table


def indented(content: RenderableType) -> RenderableType:
    """Two columns to the right."""
    return Padding(content, (0, 0, 0, 2))
