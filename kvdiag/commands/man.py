"""`kvdiag man`: the manual page of all commands, made from the same help texts.

roff is written here: what turns click's commands into pages makes one of each, and is not kept up. Two things need
care: a line that begins with a dot or an apostrophe is a request, and a hyphen is a minus where it is typed.
"""

import re
import sys
from collections.abc import Iterator

import click

import kvdiag

EXIT_STATUS = (
    ("0", "ok; the model fits; every check passes"),
    ("1", "suspect; fits with little to spare; a warning"),
    ("2", "fault; does not fit; a check fails"),
    ("3", "unknown, could not run, or wrong usage"),
)


@click.command()
@click.pass_context
def command(context: click.Context) -> None:
    """Print the manual page of all commands, for `man`: kvdiag man | man -l -."""
    sys.stdout.write("\n".join(page(context.find_root())) + "\n")


def page(root: click.Context) -> Iterator[str]:
    """The lines of the page, in roff's man macros."""
    group = root.command
    short = (group.help or "").split("\n\n")[0]
    yield f'.TH KVDIAG 1 "" "kvdiag {_text(kvdiag.__version__)}" "User Commands"'
    yield from (".SH NAME", rf"kvdiag \- {_text(' '.join(short.split()).rstrip('.'))}")
    yield from (".SH SYNOPSIS", r".B kvdiag", r"[\fIOPTIONS\fR] \fICOMMAND\fR [\fIARGS\fR]...")
    yield from (".SH DESCRIPTION", *_prose(group.help or ""))
    yield from (".SH OPTIONS", *_options(root))
    yield ".SH COMMANDS"
    for name, context in _commands(root):
        yield rf'.SS "{_text(name)}"'
        yield from (
            r".B " + _text(name),
            *(rf"{_text(piece)}" for piece in context.command.collect_usage_pieces(context)),
        )
        yield from (".PP", *_prose(context.command.help or ""), *_options(context))
    yield ".SH EXIT STATUS"
    for code, meaning in EXIT_STATUS:
        yield from (".TP", code, _text(meaning))


def _commands(context: click.Context) -> Iterator[tuple[str, click.Context]]:
    """Every command below this one with its full name, depth first."""
    group = context.command
    if not isinstance(group, click.Group):
        return
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if found is None or found.hidden:
            continue
        below = click.Context(found, parent=context, info_name=name)
        yield below.command_path, below
        yield from _commands(below)


def _options(context: click.Context) -> Iterator[str]:
    for parameter in context.command.get_params(context):
        if (shown := parameter.get_help_record(context)) is not None:
            names, meaning = shown
            yield from (".TP", rf"\fB{_text(names)}\fR", _text(meaning) or ".")


def _prose(help_text: str) -> Iterator[str]:
    """Paragraphs; one that click keeps as it is keeps its lines here, too."""
    for paragraph in re.split(r"\n\s*\n", help_text.strip()):
        lines = [line.strip() for line in paragraph.splitlines()]
        if lines[0] == "\b":
            yield from (".nf", *map(_text, lines[1:]), ".fi", ".PP")
        else:
            yield from (_text(" ".join(lines)), ".PP")


def _text(text: str) -> str:
    r"""Text that roff prints as it is."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return r"\&" + escaped if escaped.startswith((".", "'")) else escaped
