"""The parts that every HTML page is built of: document, verdict, finding, table, ledger. Pure but for its data.

A page is one file without scripts that loads nothing, which its content security policy enforces. `page.css` is shipped
with the package and read once; it holds every colour, light and dark, of statuses, lines and ledger components, as
`page.json` does the icons and links.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files

from kvdiag.formatting import format_bytes, format_ratio
from kvdiag.model import BlockOwners, Device, Diagnosis, Facts, Finding, Gap, LedgerLine, Status
from kvdiag.outputs import pool_owners
from kvdiag.outputs.html.markup import MAX_TEXT_CHARACTERS, Html, element, joined
from kvdiag.outputs.html.svg_plots import bar
from kvdiag.outputs.presentation import (
    ADVICE,
    WORDS,
    confidence,
    evidence_value,
    fixes,
    known_reports,
    life_rows,
    memory_used,
    spaced,
    unknown_by_reason,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

HATCHED = ("torch_stranded", "unaccounted")
"""Components that should be zero are striped as well as coloured."""

_DATA = json.loads(files("kvdiag.outputs.html").joinpath("page.json").read_text(encoding="utf-8"))
LINKS: Mapping[str, str] = _DATA["links"]
"""The pages of the daemon, and what is there."""

ICONS: Mapping[Status, str] = _DATA["icons"]
"""A shape of its own for each status: it can be read without colour."""

FLAG = re.compile(r"((?<![\w-])--[a-z][\w-]{1,60})")
"""A command-line flag. Its name in prose is a span of its own that does not wrap."""


@cache
def style_sheet() -> Html:
    """The style sheet of every page."""
    return Html(files("kvdiag.outputs.html").joinpath("page.css").read_text(encoding="utf-8"))


def document(worst: Status, title: str, content: Iterable[Html], *metas: Html, shown: str = "") -> str:
    """A page with its status in its title, or what is `shown` in its place; `metas` are more elements of its head."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="referrer", content="no-referrer"),
        *metas,
        element("title", f"{shown or WORDS[worst]}: {title}"),
        element("style", style_sheet()),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', _stripes(), *content), lang='en')}\n"


def _stripes() -> Html:
    patterns = [
        element(
            "pattern",
            element("rect", width=8, height=8, style="fill:var(--surface)"),
            element("path", d="M-2 2 2-2M0 8 8 0M6 10 10 6", class_=name, style="stroke:var(--p);stroke-width:3.6"),
            id=f"stripes-{name}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for name in HATCHED
    ]
    return element("svg", *patterns, width=0, height=0, style="position:absolute", aria_hidden="true")


def mark(status: Status, shown: str = "") -> Html:
    """A status as a word, or what is `shown` in its place, with its icon."""
    icon = element(
        "svg", element("path", d=ICONS[status], fill_rule="evenodd"), viewBox="0 0 16 16", aria_hidden="true"
    )
    return element("span", icon, shown or WORDS[status], class_=f"status {status}")


def verdict(status: Status, sentence: str, shown: str = "") -> Html:
    """The verdict of a page, or of a part of it."""
    return element("section", mark(status, shown), element("p", prose(sentence)), class_=f"verdict {status}")


def unobserved(text: str) -> Html:
    """A paragraph on something that could not be observed."""
    return element("p", prose(text), class_="unknown")


def definitions(rows: Iterable[tuple[str, str]]) -> Html:
    """Names with their values, in columns."""
    return element(
        "dl", *(element("div", element("dt", name), element("dd", value)) for name, value in rows), class_="about"
    )


def table(titles: Sequence[tuple[str, str]], rows: Iterable[Html], style: str = "") -> Html:
    """A table that scrolls by itself; a title is a name and a class."""
    head = [element("tr", *(element("th", name, scope="col", class_=kind) for name, kind in titles))] if titles else []
    return element("div", element("table", *head, *rows, class_=style), class_="scroll")


def row(*cells: str | tuple[str, str], header: int = 0) -> Html:
    """A row of a table; a cell is its content, or that and its class. The one at `header` names the row."""
    pairs = [(cell, "") if isinstance(cell, str) else cell for cell in cells]
    written = [element("td", content, class_=style) for content, style in pairs]
    content, style = pairs[header]
    written[header] = element("th", content, scope="row", class_=style)
    return element("tr", *written)


def prose(text: str) -> Html:
    """A sentence with its commands, which stand between backticks, as code; a flag is never broken at a hyphen."""
    pieces = text.split("`")
    if len(text) > MAX_TEXT_CHARACTERS or len(pieces) % 2 == 0:
        return joined(text.replace("`", "'"))
    return joined(
        *(element("code", _unbroken(piece)) if place % 2 else _unbroken(piece) for place, piece in enumerate(pieces))
    )


def _unbroken(text: str) -> Html:
    parts = FLAG.split(text)
    return joined(*(element("span", part, class_="flag") if place % 2 else part for place, part in enumerate(parts)))


def lives_table(diagnosis: Diagnosis) -> Iterator[Html]:
    """The lives of the server, each with its verdict; nothing where there is just the present one."""
    if lives := life_rows(diagnosis):
        yield element("h2", "Server history, one line per start")
        rows = [row(mark(status), when, found, header=1) for status, when, found in lives]
        yield table((("", ""), ("period", ""), ("verdict", "")), rows, "lives")


def finding_card(finding: Finding, when: str = "", *, served: bool = False) -> Html:
    """A finding with when it was observed, its evidence, and what to do about it; one that a daemon serves links to its
    runbook there.
    """
    rows = [
        row(
            spaced(one.name),
            (evidence_value(one), "text" if isinstance(one.value, str) else "number"),
            (one.source, "dim"),
        )
        for one in finding.evidence
        if one.value is not None
    ]
    evidence = table((), rows, "evidence") if rows else ""
    advice = [
        joined(
            element("dt", title),
            element(
                "dd",
                _runbook_link(text) if served and field == "runbook" else prose(text),
                class_="remedy" if field == "remedy" else "plain",
            ),
        )
        for title, field in ADVICE
        if (text := getattr(finding, field))
    ]
    advice += [
        joined(
            element("dt", title),
            element("dd", element("code", change), prose(f": {effect}"), class_="remedy" if title == "Fix" else "plain")
            if effect
            else element("dd", prose(change), class_="dim"),
        )
        for title, change, effect in fixes(finding)
    ]
    advice += _known_issue(finding)
    return element(
        "section",
        element("header", mark(finding.status), element("h3", finding.title)),
        element("p", prose(finding.summary)),
        *(element("p", line, class_="dim") for line in (confidence(finding), when) if line),
        element("div", evidence, element("dl", *advice, class_="advice"), class_="columns"),
        class_="finding",
    )


def _runbook_link(path: str) -> Html:
    address = f"/runbooks/{path.rpartition('/')[2]}"
    return element("a", address, href=address)


def _known_issue(finding: Finding) -> Iterator[Html]:
    """The known reports that a finding matches, each with its link: links are kvdiag's own data, never a server's."""
    issue, reports = known_reports(finding)
    if issue:
        content = [
            element("p", element("a", name, href=link, rel="noopener noreferrer"), prose(f": {text}"))
            for name, link, text in reports
        ]
        yield joined(element("dt", "Known issue"), element("dd", element("p", prose(issue)), *content, class_="plain"))


def verdict_rows(findings: Iterable[Finding]) -> Html:
    """Verdicts with their summaries, one a row."""
    return _pairs([([one.id], one.summary) for one in findings])


def unknown_rows(findings: Iterable[Finding]) -> Html:
    """Unknown verdicts, those with one reason together."""
    return _pairs([(ids, reason) for reason, ids in unknown_by_reason(findings).items()], "unknown")


def gap_rows(gaps: Iterable[Gap]) -> Html:
    """What a source could not read, one a row."""
    return _pairs([([gap.source], gap.reason) for gap in gaps])


def _pairs(rows: Iterable[tuple[Sequence[str], str]], style: str = "dim") -> Html:
    written = [row((joined(*(element("div", name) for name in names)), style), prose(text)) for names, text in rows]
    return table((), written, "pairs")


def ledger_cards(
    lines: Iterable[LedgerLine], devices: Mapping[str, Device], notes: Mapping[str | None, Html] | None = None
) -> Html:
    """A bar and a table for each GPU; without a GPU, the pool as the engine reports it.

    `devices` are by UUID, `notes` stand below the title of the GPU with that UUID.
    """
    own: dict[str | None, list[LedgerLine]] = {}
    for line in lines:
        own.setdefault(line.uuid, []).append(line)
    cards = [
        _ledger_card(number, devices.get(uuid or ""), mine, (notes or {}).get(uuid, Html("")))
        for number, (uuid, mine) in enumerate(own.items())
    ]
    cards += [
        unobserved(f"GPU {device.index} {device.name}: its memory cannot be read.")
        for device in devices.values()
        if device.memory is None and device.uuid not in own
    ]
    if not devices and all(uuid is None for uuid in own):
        cards.insert(0, unobserved("Device memory not observed."))
    return element("div", *cards, class_="gpus")


def owners_table(owners: Sequence[BlockOwners], facts: Facts) -> Iterator[Html]:
    """Who has the blocks of the KV pools; nothing where no agent counts them."""
    if owners:
        yield element("h2", pool_owners.owners_title(owners))
        rows = [
            row(
                (one.name, "fault" if one.owner == "orphaned" else ""),
                *((figure, "number") for figure in (one.blocks, one.size, one.share)),
            )
            for one in pool_owners.owner_rows(owners, facts)
        ]
        titles = (("owner", ""), (f"{facts.capabilities.unit}s", "number"), ("size", "number"), ("share", "number"))
        yield table(titles, rows, "owners")
        yield from (element("p", note, class_="dim") for note in pool_owners.request_notes(owners, facts))


def _ledger_card(number: int, device: Device | None, lines: Sequence[LedgerLine], note: Html) -> Html:
    titles = (("component", ""), ("bytes", "number"), ("share", "number"), ("source", "source"), ("detail", "detail"))
    used = sum(line.bytes for line in lines)
    memory = None if device is None else device.memory
    gpu = lines[0].gpu
    title = "KV pool, as the engine reports it" if gpu is None else f"GPU {gpu}"
    whole = max(used if memory is None else memory.total_bytes, 1)
    scale = f"{format_bytes(used)} in total" if memory is None else memory_used(memory)
    parts = [(line.component, line.bytes, f"{spaced(line.component)}: {format_bytes(line.bytes)}") for line in lines]
    return element(
        "section",
        element("h3", f"{title} ", element("small", "" if device is None else device.name)),
        element("p", scale, class_="dim"),
        note,
        bar(f"ledger-{number}", f"{title}: {scale}", parts, whole),
        table(titles, _ledger_rows(lines, whole), "ledger"),
        class_="gpu",
    )


def _ledger_rows(lines: Sequence[LedgerLine], whole: int) -> Iterator[Html]:
    for line in lines:
        swatch = element("i", class_=f"swatch {line.component}", aria_hidden="true")
        yield row(
            joined(swatch, spaced(line.component)),
            (format_bytes(line.bytes), "number"),
            (format_ratio(line.bytes / whole), "number"),
            (line.provenance, "source dim"),
            (line.detail, "detail dim"),
        )
