"""HTML in which nothing from outside is ever markup: text is escaped unless an element was made of it here. Pure."""

from html import escape

from kvdiag.outputs.presentation import printable

MAX_TEXT_CHARACTERS = 2_000
"""Of one text; attributes are made here, and are as long as they are."""


class Html(str):
    """Markup that was made here."""

    __slots__ = ()


VOID = frozenset({"meta", "rect", "line", "path"})
"""Elements that close themselves where they have no content."""


def element(tag: str, /, *content: str, **attributes: str | float) -> Html:
    """An element. Content that is `Html` is kept as it is, every other text is escaped.

    An attribute's trailing underscore is dropped and others become hyphens: `class_`, `stroke_width`; empty ones go.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(str(value)))}"'
        for key, value in attributes.items()
        if value != ""
    )
    if tag in VOID and not content:
        return Html(f"<{tag}{written}>" if tag == "meta" else f"<{tag}{written}/>")
    return Html(f"<{tag}{written}>{joined(*content)}</{tag}>")


def joined(*content: str) -> Html:
    """Elements and texts one after another."""
    return Html("".join(one if isinstance(one, Html) else _escaped(one) for one in content))


def _escaped(text: str) -> str:
    cut = text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]}…"
    return escape(printable(cut))
