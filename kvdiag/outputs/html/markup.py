"""HTML in which nothing from outside is ever markup: text is escaped unless an element was made of it here. Pure."""

from __future__ import annotations

import unicodedata
from html import escape

MAX_TEXT_CHARACTERS = 2_000
"""Of one text; attributes are made here, and are as long as they are."""


class Html(str):
    """Markup that was made here."""

    __slots__ = ()


VOID = frozenset({"meta", "rect", "line", "path"})
"""Elements that close themselves where they have no content."""


def element(tag: str, /, *content: str, **attributes: str | float) -> Html:
    """An element. Content that is `Html` stands as it is, every other text is escaped.

    An attribute's trailing underscore is dropped and others become hyphens: `class_`, `stroke_width`.
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_printable(str(value)))}"' for key, value in attributes.items()
    )
    if tag in VOID and not content:
        return Html(f"<{tag}{told}>" if tag == "meta" else f"<{tag}{told}/>")
    return Html(f"<{tag}{told}>{joined(*content)}</{tag}>")


def joined(*content: str) -> Html:
    """Elements and texts after one another."""
    return Html("".join(one if isinstance(one, Html) else _escaped(one) for one in content))


def _escaped(text: str) -> str:
    cut = text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]}…"
    return escape(_printable(cut))


def _printable(text: str) -> str:
    if text.isascii() and text.isprintable():  # as the path of a line is, of a hundred thousand characters
        return text
    return "".join(map(_harmless, text))


def _harmless(character: str) -> str:
    # Control characters are no HTML, and those that turn the line round could make a name read as another.
    category = unicodedata.category(character)
    if category in {"Zl", "Zp"} or character in "\n\t":
        return " "
    return "\N{REPLACEMENT CHARACTER}" if category in {"Cc", "Cf", "Cs"} else character
