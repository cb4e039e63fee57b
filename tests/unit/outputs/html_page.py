"""A page as a browser reads it."""

from html.parser import HTMLParser

from kvdiag.outputs.html.markup import VOID


class Page(HTMLParser):
    """A page's elements and texts, code between backticks; elements that are not closed in their order fail."""

    def __init__(self, page: str) -> None:
        """Read it."""
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._in_sentence = False
        self._inline: list[bool] = []
        self.feed(page)
        self.close()
        assert [] == self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.seen.append((tag, dict(attrs)))
        # Code and flags are parts of their sentence, a flag also of its command.
        inline = tag == "code" or ("class", "flag") in attrs
        self._in_sentence &= inline
        self._inline.append(inline)
        if tag == "code":
            self._keep("`")
        if tag not in VOID:
            self.open.append(tag)
        else:
            self._inline.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """It is the one that was opened last."""
        if tag == "code":
            self._keep("`")
        if tag not in VOID or tag in self.open[-1:]:
            assert tag == self.open.pop()
            self._in_sentence &= self._inline.pop()

    def handle_data(self, data: str) -> None:
        """Keep it."""
        if self.open[-1:] == ["style"]:
            return
        self._keep(data)

    def _keep(self, text: str) -> None:
        self.texts[-1:] = [self.texts[-1] + text] if self._in_sentence else [*self.texts[-1:], text]
        self._in_sentence = True

    @property
    def text(self) -> str:
        """All that a person reads."""
        return " ".join(self.texts)

    def having(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of the elements of one kind."""
        return [attrs for name, attrs in self.seen if name == tag]

    def lines(self, style: str) -> list[str]:
        """The paths of a line's class."""
        drawn = [
            attrs["d"] or ""
            for attrs in self.having("path")
            if "line" in (attrs.get("class") or "").split() and style in (attrs["class"] or "")
        ]
        return [path for path in drawn if path != "M1 5H21"]
