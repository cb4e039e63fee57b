"""`kvdiag explain ID`: what a verdict means, without a server."""

from __future__ import annotations

from difflib import get_close_matches

import click

from kvdiag.commands.options.common import output_option
from kvdiag.commands.printing import print_json, print_text
from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.errors import KvdiagError
from kvdiag.outputs.terminal import explanation


@click.command()
@click.argument("verdict", metavar="[ID]", required=False)
@output_option
def command(verdict: str | None, output: str) -> None:
    """Explain the verdict ID: symptom, likely cause, how to confirm it, what to change. Without ID, list all."""
    if verdict is not None and verdict not in KNOWLEDGE:
        near = get_close_matches(verdict, KNOWLEDGE, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise KvdiagError(f"unknown verdict {verdict!r}{meant}; kvdiag explain lists all")
    known = KNOWLEDGE if verdict is None else {verdict: KNOWLEDGE[verdict]}
    if output == "json":
        print_json(explanation.document(known) if verdict is None else explanation.one(verdict, KNOWLEDGE[verdict]))
    else:
        print_text(explanation.listing(known) if verdict is None else explanation.render(verdict, KNOWLEDGE[verdict]))
