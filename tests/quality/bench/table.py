"""Run the benchmarks one after the other, print their output, and put their figures into one table.

python -m tests.quality.bench.table            all of them; some hour on two cores
python -m tests.quality.bench.table kv_score   some of them

Each notes figures of one run: kvdiag's own, the figure to compare with, and the ratio of both. They are kept in
tests/quality/bench/results.json until the benchmark runs again; the whole table is in docs/accuracy.md, a few rows
of it in the README.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NOTES = "KVDIAG_BENCH_NOTES"
"""The file that a benchmark run from here adds its figures to."""

BENCHES = (
    "serve_cost",
    "agent_cost",
    "census_cost",
    "serve_soak",
    "day_speed",
    "kv_score",
    "diagnosis_score",
    "worlds_score",
    "soak_power",
    "fleet_power",
    "fleet_rounds",
    "fleet_speed",
    "admission_replay",
)
KEPT = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[3] / "docs" / "accuracy.md"
README = Path(__file__).parents[3] / "README.md"
IN_README = (
    "serve, 8 GPUs: resident memory, MiB",
    "serve, 8 GPUs: CPU, % of one core",
    "serve, 8 GPUs: CPU seconds per 1,000 scrapes",
    "fit: published figures reproduced, no setting adjusted",
    "incidents: precision",
    "incidents: recall, fault verdicts only",
)
"""The rows that the README shows; of several rows of one name the first."""

BEGIN, END = "<!-- what make bench prints -->", "<!-- until here -->"


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
    """Run them; 1 where one of them could not run to its end, whose part of the table stays as it was."""
    missing: list[str] = []
    results: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for name in names or BENCHES:
        sys.stdout.write(f"\n== {name}\n")
        sys.stdout.flush()
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder) / "notes"
            done = subprocess.run(
                [sys.executable, "-m", f"tests.quality.bench.{name}"],
                env={**os.environ, NOTES: str(notes)},
                check=False,
            )
            lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
        # 1 is a budget that is not kept, 3 something that is not here: neither ends the others.
        if done.returncode in (0, 1) and lines:
            results[name] = {"machine": machine(), "rows": [json.loads(line) for line in lines]}
            KEPT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        else:
            missing.append(name)
    table = rendered({name: results[name] for name in BENCHES if name in results})
    sys.stdout.write(f"\n{table}")
    sys.stdout.write(f"not run to its end here: {', '.join(missing)}\n" if missing else "")
    for page, part in ((PAGE, table), (README, short(table))):
        page.write_text(with_table(page.read_text(encoding="utf-8"), part), encoding="utf-8")
    return 1 if missing else 0


def machine() -> str:
    """What the figures were taken on, and when."""
    day = datetime.now(UTC).date().isoformat()
    return f"{os.cpu_count()} x {processor()}, Python {platform.python_version()}, {day}"


def rendered(results: Mapping[str, Any]) -> str:
    """The table in Markdown: the rows of each benchmark are of one run, and machines and days are named below it."""
    told = ["| measurement | kvdiag | reference value | reference | ratio | benchmark |", "|---|---|---|---|---|---|"]
    for name, row in ((name, row) for name, one in results.items() for row in one["rows"]):
        own, other = float(row["own"]), float(row["other"])
        ratio = f"{own / other:.2f}" if other else "-"
        unit = f" {row['unit']}" if row["unit"] else ""
        told.append(f"| {row['what']} | {_text(own)}{unit} | {_text(other)}{unit} | {row['than']} | {ratio} | {name} |")
    machines: dict[str, list[str]] = {}
    for name, one in results.items():
        machines.setdefault(one["machine"], []).append(name)
    ran = "; ".join(f"{', '.join(names)} on {where}" for where, names in machines.items())
    return "\n".join(told) + f"\n\nEach row is from one run: {ran}.\n"


def short(table: str) -> str:
    """The head of the table and the rows that the README shows, without the benchmark's name."""
    lines = [f"{line.rpartition('|')[0].rpartition('|')[0]}|" for line in table.splitlines() if line.startswith("|")]
    rows = [next((line for line in lines if line.startswith(f"| {name} |")), None) for name in IN_README]
    return "\n".join([*lines[:2], *(row for row in rows if row)]) + "\n"


def with_table(document: str, table: str) -> str:
    """The document with this table in the place of the one between its marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"no place for the table: {BEGIN} and {END} are not there")
    return f"{before}{begin}\n{table}{end}{after}"


def _text(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
