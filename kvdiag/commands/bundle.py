"""`kvdiag bundle`: one archive to attach to a report of a bug, and what is in it.

The trace is the newest hour of a recording, or what a server shows in some seconds of watching, without load. With it
go the diagnosis, the versions, the options of this call without keys, and what `doctor` finds. Nothing is read that
the commands do not read; what a reader of the archive learns of the server is listed when it is written.
"""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

import asyncio
import json
import platform
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import click

import kvdiag
from kvdiag.commands.connect import agent_reader, base_url, connect, without_credentials
from kvdiag.commands.doctor import look
from kvdiag.commands.options.common import Duration, ServerAccess, agent_option, collected, given_by, server_access
from kvdiag.diagnosis import diagnose
from kvdiag.errors import KvdiagError
from kvdiag.feeds.live.sampling import Clock, Pace, Sampler, TimelineBuilder
from kvdiag.feeds.recording.archive import TRACE, newest, write_bundle
from kvdiag.feeds.recording.folder_timeline import read_recorded
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.formatting import format_bytes, format_duration
from kvdiag.model import Facts, Timeline
from kvdiag.outputs.documents import diagnosis_document
from kvdiag.outputs.terminal import doctor_text

CONTENTS = {
    "about.json": "versions, and the options of this call without keys",
    "diagnosis.json": "the diagnosis",
    "doctor.json": "what kvdiag doctor found",
    TRACE: "samples of the newest hour",
}

NAMED = (
    "It holds addresses, model and process names, flags of the server, and request ids where they were recorded with "
    "--show-request-ids; no prompts, no keys, no passwords."
)


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """Where the bundle goes, and the server to watch."""

    url: str | None = given_by("Server to watch, instead of RECORDING.")
    access: ServerAccess = given_by(server_access)
    agent_dir: Path | None = given_by(agent_option)
    watch: float = given_by("How long to watch it.", type=Duration(5.0, 600.0), default="30s", metavar="DURATION")
    out: Path | None = given_by("Archive to write [kvdiag-bundle-TIME.zip].", metavar="FILE")


@click.command()
@click.argument("recording", type=click.Path(path_type=Path), required=False)
@collected(BundleOptions, "options")
def command(recording: Path | None, options: BundleOptions) -> None:
    """Pack a diagnosis and its data into one archive for a bug report.

    RECORDING is a trace or a recorder's directory, of which the newest hour is packed; or --url watches a server.
    `kvdiag diagnose` reads the archive as it reads a trace. Look into it before you pass it on.
    """
    if (recording is None) == (options.url is None):
        raise click.UsageError("give either RECORDING or --url URL")
    out = options.out or Path(time.strftime("kvdiag-bundle-%Y%m%d-%H%M%S.zip", time.gmtime()))
    if str(out) == "-":
        raise KvdiagError("cannot write a bundle to -: stdout has the list of its content; give a file by --out")
    try:
        exists = out.exists()
    except OSError as error:  # such as a name that is too long
        raise KvdiagError(f"cannot write {out}: {error.strerror}") from error
    if exists:
        raise KvdiagError(f"{out} exists: give another file by --out")
    if recording is not None:
        timeline, facts = read_recorded(recording)
        timeline = newest(timeline)
    else:
        timeline, facts = asyncio.run(_watched(options.url or "", options))
    checks = asyncio.run(look(options.url, options.access, options.agent_dir, None))
    documents = {
        "about.json": _about(recording, options),
        "diagnosis.json": diagnosis_document.document(diagnose(timeline, facts)),
        "doctor.json": doctor_text.document(checks),
    }
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / TRACE
        with TraceWriter(trace, facts, earlier_facts=timeline.earlier_facts) as writer:
            for sample in timeline.samples:
                writer.add(sample)
            for mark in timeline.marks:
                writer.add(mark)
        texts = {name: json.dumps(one, indent=2, allow_nan=False) + "\n" for name, one in documents.items()}
        sizes = write_bundle(out, trace, texts)
    for name, size in sizes.items():
        click.echo(f"{name:16}{format_bytes(size):>10}  {CONTENTS[name]}")
    click.echo(f"{out}: {format_bytes(out.stat().st_size)}. {NAMED}")


async def _watched(url: str, options: BundleOptions) -> tuple[Timeline, Facts]:
    """What a server shows by itself for some seconds."""
    agents = agent_reader(options.agent_dir)
    recorder = TimelineBuilder()
    click.echo(f"watching for {format_duration(options.watch)}", err=True)
    try:
        async with connect(url, options.access) as (_, server):
            sampler = Sampler(
                engine=server.engine,
                nvml=server.nvml,
                agents=agents,
                facts=server.facts,
                record=recorder.add,
                pace=Pace(engine_seconds=1.0),
                clock=Clock(),
                load=lambda: None,
            )
            try:
                async with asyncio.timeout(options.watch):
                    await sampler.run()
            except TimeoutError:
                pass
            return recorder.timeline(), server.facts
    finally:
        if agents is not None:
            agents.close()


def _about(recording: Path | None, options: BundleOptions) -> dict[str, Any]:
    """Versions, and what this was made from; a path is given by its name alone, an address without credentials."""
    return {
        "schema_version": 1,
        "kvdiag": kvdiag.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": dict(_packages()),
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "recording": None if recording is None else recording.name,
        "url": None if options.url is None else without_credentials(base_url(options.url)),
        "agent_dir": options.agent_dir is not None,
    }


def _packages() -> list[tuple[str, str]]:
    """The versions of what kvdiag depends on; none where it runs from its sources alone."""
    try:
        names = [one.split(">")[0].split("=")[0].strip() for one in requires("kvdiag") or () if ";" not in one]
        return [(name, version(name)) for name in names]
    except PackageNotFoundError:
        return []
