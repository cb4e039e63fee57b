"""`kvdiag explain ID`: what a verdict or an alert means, without a server."""

import sys
from difflib import get_close_matches

import click

from kvdiag.alert_files import runbooks, runbooks_of
from kvdiag.commands.options.common import output_option
from kvdiag.commands.printing import print_json, print_text
from kvdiag.diagnosis.knowledge import KNOWLEDGE, entry_of, known_engines
from kvdiag.errors import KvdiagError
from kvdiag.outputs.terminal import explanation


@click.command()
@click.argument("name", metavar="[ID|ALERT|WORD]", required=False)
@click.option("--engine", type=click.Choice(known_engines()), help="Explain it for this engine's servers.")
@click.option("--runbook", "whole", is_flag=True, help="Print the whole runbook.")
@output_option
def command(name: str | None, engine: str | None, output: str, *, whole: bool) -> None:
    """Explain a verdict: symptom, likely cause, how to confirm it, what to change. Without ID, list all.

    ALERT is an alert's name, WORD a part of an id, such as `host`. An alert without a verdict shows its runbook.
    """
    if name is None:
        if whole:
            raise click.UsageError("--runbook needs an ID; kvdiag explain lists all")
        entries = {verdict: entry_of(verdict, engine) for verdict in KNOWLEDGE}
        document, shown = explanation.document(entries), explanation.listing(entries)
    elif (found := _found(name)) in KNOWLEDGE and not whole:
        entry = entry_of(found, engine)
        document, shown = explanation.one(found, entry), explanation.render(found, entry)
    else:
        text = runbooks()[found].read_text(encoding="utf-8")
        document = {"schema_version": explanation.SCHEMA_VERSION, "id": found, "text": text}
        shown = text
    if output == "json":
        print_json(document)
    elif isinstance(shown, str):
        sys.stdout.write(shown)  # never wrapped, so that commands can be copied
    else:
        print_text(shown)


def _found(name: str) -> str:
    """Return the id that a name means: an id, an alert's name, or a part of one id alone."""
    known = sorted(runbooks())
    found = [name] if name in known else runbooks_of(name) or [one for one in known if name.lower() in one]
    if len(found) == 1:
        return found[0]
    if found:
        raise KvdiagError(f"{name!r} matches several ids: {', '.join(found)}; give one of them")
    near = get_close_matches(name, known, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise KvdiagError(f"unknown verdict {name!r}{meant}; kvdiag explain lists all")
