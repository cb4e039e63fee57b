"""A page that is read repeatedly: the incremental parser agrees with the full parser after every change."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdiag.sources.prometheus_text import Page, PageParser
from tests.builders.metrics_pages import parse_page

SCRAPES = tuple(sorted((Path(__file__).parents[2] / "fixtures" / "scrapes").glob("*.prom")))
SHORT = """\
# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 4.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0"} 1e+06
"""

PIECES = (
    "3.0",
    "1e+06",
    "NaN",
    "+Inf",
    "1_0",
    "x",
    "",
    " ",
    "\t",
    "\n",
    "#",
    "{",
    "}",
    '"',
    "0 1700000000000",
    "9" * 400,
)
CHANGES = st.lists(st.tuples(st.integers(0, len(SHORT)), st.integers(0, 8), st.sampled_from(PIECES)), max_size=3)


class Parser(PageParser):
    """Takes all steps at once."""

    def parse(self, text: str) -> Page:
        """The page's series by name."""
        steps = self.parsing(text)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]


def said(parse: object, text: str) -> Page | str:
    """What a parser makes of a text: the page, or that it is none. Texts, since a NaN is not equal to itself."""
    assert callable(parse)
    try:
        return {name: repr(lines) for name, lines in parse(text).items()}  # type: ignore[misc]
    except ValueError:
        return "refused"


@pytest.mark.parametrize("path", SCRAPES, ids=lambda path: path.stem)
def test_values_that_changed_are_read(path: Path) -> None:
    """Every real page with other values, after the page itself."""
    text = path.read_text(encoding="utf-8")
    lines = [line if line[:1] in ("", "#") else f"{line.rpartition(' ')[0]} 7.25" for line in text.split("\n")]
    parser = Parser()
    for one in (text, "\n".join(lines), text):
        assert said(parse_page, one) == said(parser.parse, one)


@pytest.mark.parametrize(
    "later",
    [
        SHORT.replace("3.0", "5"),
        SHORT.replace("3.0", "NaN").replace("1e+06", "+Inf"),
        SHORT.replace('engine="1"', 'engine="2"'),
        SHORT.replace("counter", "gauge"),
        SHORT.replace("4.0", "4.0 1700000000000"),
        SHORT.replace("4.0", "four"),
        SHORT.replace("4.0", "4_0"),
        SHORT.replace("4.0", ""),
        SHORT.replace("4.0", "9" * 400),
        SHORT + SHORT,
        SHORT.replace("\n", "\r\n"),
        "",
    ],
)
def test_whatever_comes_next_is_parsed_as_if_nothing_had_been_before(later: str) -> None:
    """Other labels, types, timestamps and lines, and what is no page; and then the first page again."""
    parser = Parser()
    parser.parse(SHORT)
    assert said(parse_page, later) == said(parser.parse, later)
    assert said(parse_page, SHORT) == said(parser.parse, SHORT)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a 3 1700\n", "a 3 1800\n"),
        ('a{x="y"} 3 # {t="1"} 5\n', 'a{x="y"} 3 # {t="1"} 6\n'),
        ("a 3 \n # x 5\n", "a 3 \n # x 7\n"),
        ("nan\n", "inf\n"),
        ('# TYPE "" summary\n_count 3\nb 4 ', '# TYPE "" summary\n_count 9\nb 4 '),
        ("a 3\n", f"a {'0' * 17_000}3\n"),
        ("a 3\n", f"a -{'9' * 400}\n"),
        ("a 3\n", f"a {'9' * 400}\n"),
        ('a{b="c\\" 1"} 3\n', 'a{b="c\\" 1"} 4\n'),
        ('a{b="# d"} 3\n', 'a{b="# d"} 4\n'),
        ("a\t3\n", "a\t4\n"),
    ],
)
def test_what_is_not_plain_is_parsed_whole_each_time(first: str, second: str) -> None:
    """Timestamps, exemplars, comments that are indented, labels with spaces: a value is what the whole parser says."""
    parser = Parser()
    for text in (first, first, second, first):
        assert said(parse_page, text) == said(parser.parse, text)


def test_nothing_is_kept_of_a_page_of_megabytes() -> None:
    """A page of megabytes, longer than any server's own, is parsed and not retained."""
    parser = Parser()
    assert 40_000 == len(parser.parse("".join(f"a{number} 1\n" for number in range(40_000))))
    assert sum(map(sys.getsizeof, vars(parser).values())) < 2_000


@given(CHANGES, st.lists(st.sampled_from(["3.0", "-7", "NaN", "1e300", "4 1700000000000", "x"]), max_size=4))
def test_a_page_in_which_only_values_change(change: list[tuple[int, int, str]], values: list[str]) -> None:
    """After any changes of a page, the incremental parser agrees with the full parser on changed values."""
    parser, text = Parser(), SHORT
    for place, cut, piece in change:
        text = text[:place] + piece + text[place + cut :]
    for value in ("3.0", *values):
        changed = text.replace("4.0", value)
        assert said(parse_page, changed) == said(parser.parse, changed)


@given(st.lists(CHANGES))
def test_any_pages_in_a_row(changes: list[list[tuple[int, int, str]]]) -> None:
    """For any sequence of pages, the incremental parser agrees with the full parser on each."""
    parser = Parser()
    for change in changes:
        text = SHORT
        for place, cut, piece in change:
            text = text[:place] + piece + text[place + cut :]
        assert said(parse_page, text) == said(parser.parse, text)
