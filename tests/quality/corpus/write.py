"""Write the incidents' traces: python -m tests.quality.corpus.write [--folder FOLDER]. Unchanged traces are not
rewritten.

Each trace's header names the incident's source, the reported facts and the assumptions; its verdict is in
expected.json alone.
"""

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvdiag.feeds.recording.trace import TraceWriter
from tests.quality.corpus.incident import Incident
from tests.quality.corpus.incidents import INCIDENTS

TRACES = Path(__file__).parents[2] / "golden" / "traces" / "incidents"
SUFFIX = ".jsonl.gz"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what differs, and remove what no incident makes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=TRACES)
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"*{SUFFIX}"):
        if old.name.removesuffix(SUFFIX) not in INCIDENTS:
            old.unlink()
    for incident in INCIDENTS.values():
        path = folder / f"{incident.id}{SUFFIX}"
        lines = content(incident)
        if not path.exists() or parts(gzip.decompress(path.read_bytes())) != parts(lines):
            path.write_bytes(gzip.compress(lines, compresslevel=9, mtime=0))
            sys.stdout.write(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB\n")
    return 0


def content(incident: Incident) -> bytes:
    """A trace's lines."""
    timeline, facts = incident.recording().play()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        with TraceWriter(path, facts, about(incident)) as writer:
            for sample in timeline.samples:
                writer.add(sample)
        return path.read_bytes()


def parts(lines: bytes) -> tuple[dict[str, Any], bytes]:
    """A trace's header without what changes with kvdiag (its version, its names of what an engine reports), and the
    rest of its lines.
    """
    first, _, rest = lines.partition(b"\n")
    header: dict[str, Any] = json.loads(first)
    header.pop("kvdiag_version", None)
    header["facts"].pop("capabilities", None)
    return header, rest


def about(incident: Incident) -> dict[str, Any]:
    """What a trace says about itself."""
    return {
        "incident": incident.id,
        "sources": list(incident.sources),
        "reported": incident.reported,
        "assumed": incident.assumed,
    }


if __name__ == "__main__":
    sys.exit(main())
