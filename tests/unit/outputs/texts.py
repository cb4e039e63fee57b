"""What a pipe and a terminal get of a result, its parts, and text that would do harm there."""

import io
import unicodedata

from rich.console import Console, RenderableType

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J[bold red]loud[/] [link=http://x]\r\bOK\u202etxt\u2028\ud800 :smile:"
"""What a name or an error may bring: escape sequences, carriage returns, markup, overrides, surrogates."""


def piped(result: RenderableType, width: int = 80) -> str:
    """What a pipe would get."""
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, color_system=None, force_terminal=False).print(result)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def on_a_terminal(result: RenderableType) -> str:
    """What a terminal with colours would get."""
    file = io.StringIO()
    Console(file=file, width=80, highlight=False, color_system="truecolor", force_terminal=True).print(result)
    return file.getvalue()


def parts(text: str) -> dict[str, str]:
    """The text by its headings; what comes first stands under "verdict"."""
    found, heading = {"verdict": ""}, "verdict"
    for before, line in zip(["x", *text.splitlines()], text.splitlines(), strict=False):
        if not before.strip() and line.strip() and not line.startswith(" "):
            heading = line.strip()
            found[heading] = ""
        else:
            found[heading] += f"{line}\n"
    return found


def harmful(text: str) -> set[str]:
    """Characters of a text that a terminal would act on."""
    return {one for one in text if one != "\n" and unicodedata.category(one) in {"Cc", "Cf", "Cs", "Zl", "Zp"}}
