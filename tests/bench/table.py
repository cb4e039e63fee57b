"""Run the benchmarks one after the other, print what they print, and put their figures into one table.

python -m tests.bench.table            all of them; some half an hour on two cores
python -m tests.bench.table kv_score   some of them

Each notes figures of one run: kvdiag's own, what stands beside them, and the ratio of both. The table is written to
tests/bench/results.md where all of them ran.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

NOTES = "KVDIAG_BENCH_NOTES"
"""The file that a benchmark run from here adds its figures to."""

BENCHES = ("kv_score", "serve_cost", "agent_cost", "day_speed", "admission_replay", "diagnosis_score", "serve_soak")
RESULTS = Path(__file__).with_name("results.md")


def note(what: str, own: float, other: float, *, than: str, unit: str) -> None:
    """Keep a figure for the table: kvdiag's own, and the other that it is compared with, in the same unit."""
    if path := os.environ.get(NOTES):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "own": own, "other": other, "than": than, "unit": unit}) + "\n")


def processor() -> str:
    """What this machine computes with."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main(names: Sequence[str]) -> int:
    """Run them; 1 where one of them could not run to its end."""
    missing: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        for name in names or BENCHES:
            sys.stdout.write(f"\n== {name}\n")
            sys.stdout.flush()
            done = subprocess.run(
                [sys.executable, "-m", f"tests.bench.{name}"], env={**os.environ, NOTES: str(notes)}, check=False
            )
            # 1 is a budget that is not kept, 3 something that is not here: neither ends the others.
            missing += [name] if done.returncode not in (0, 1) else []
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    table = rendered([json.loads(line) for line in lines], missing)
    sys.stdout.write(f"\n{table}")
    if not names and not missing:
        RESULTS.write_text(table, encoding="utf-8")
    return 1 if missing else 0


def rendered(rows: Sequence[dict[str, object]], missing: Sequence[str]) -> str:
    """The table in Markdown, with the machine."""
    day = datetime.now(UTC).date().isoformat()
    told = [
        "# What `make bench` measures\n",
        f"{os.cpu_count()} x {processor()}, Python {platform.python_version()}, {day}; each line in one run.\n",
        "| what | kvdiag | beside it | which is | ratio |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        own, other = float(str(row["own"])), float(str(row["other"]))
        ratio = f"{own / other:.2f}" if other else "-"
        unit = f" {row['unit']}" if row["unit"] else ""
        told.append(f"| {row['what']} | {_text(own)}{unit} | {_text(other)}{unit} | {row['than']} | {ratio} |")
    told += [f"\nNot run to its end here: {', '.join(missing)}."] if missing else []
    return "\n".join(told) + "\n"


def _text(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
