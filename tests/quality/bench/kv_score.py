"""Print the KV-cost model's score on the published startup logs, next to the textbook formula and hf-mem.

python -m tests.quality.bench.kv_score            the scores and every miss
python -m tests.quality.bench.kv_score --verbose  every check as well
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.quality.bench.table import note
from tests.unit.kv.dataset import DATA, GIB, Check, checks, config_of, rows, textbook_range, with_range
from tests.unit.kv.pool_errors import pool_error_summary, pool_errors

Ranges = Callable[[dict[str, Any], str], tuple[float, float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verbose", action="store_true")
    verbose = parser.parse_args(arguments).verbose
    found = checks()
    by_row = {row["id"]: row for row in rows()}
    print_line("checks inside the printed figure's rounding", "no setting adjusted", "all")
    print_line("kvdiag", score(found, strict=True), score(found, strict=False))
    for name, ranges in others():
        theirs = [with_range(check, *ranges(by_row[check.row], check.figure)) for check in found]
        print_line(name, score(theirs, strict=True), score(theirs, strict=False))
        for what, strict in (("no setting adjusted", True), ("usual settings adjusted", False)):
            shares = (100 * share(checked, strict=strict) for checked in (found, theirs))
            note(f"fit: published figures reproduced, {what}", *shares, than=name, unit="%")
    print_line("KV pool by estimated overheads", pool_error_summary(pool_errors()))
    for check in found:
        if verbose or not check.inside:
            mark = "inside" if check.inside else f"{check.miss_ratio:+.2%}"
            kind = "strict" if check.strict else "fitted"
            sys.stdout.write(
                f"{check.row} {kind} {check.figure:16} printed {check.printed:<12g} "
                f"model {check.low:g} to {check.high:g}  {mark}  ({check.settings})\n"
            )
    for miss in misses():
        sys.stdout.write(f"{miss['row']}: {miss['explanation']}\n")
    return 0


def misses() -> list[dict[str, Any]]:
    """The committed table of misses and their explanations."""
    found: list[dict[str, Any]] = json.loads((DATA / "misses.json").read_text())
    return found


def share(found: Sequence[Check], *, strict: bool) -> float:
    """The figures inside the rounding of what the engine printed, of all or of those for which nothing is fitted."""
    chosen = [check for check in found if check.strict or not strict]
    return sum(check.inside for check in chosen) / len(chosen)


def score(found: Sequence[Check], *, strict: bool) -> str:
    """Inside / all, and the share."""
    chosen = [check for check in found if check.strict or not strict]
    inside = sum(check.inside for check in chosen)
    return f"{inside} / {len(chosen)} = {inside / len(chosen):.1%}"


def print_line(*cells: str) -> None:
    """One row of the score table."""
    sys.stdout.write("".join(f"{cell:46}" if place == 0 else f"{cell:24}" for place, cell in enumerate(cells)) + "\n")


def others() -> list[tuple[str, Ranges]]:
    """The installed calculators to compare the model with."""
    found: list[tuple[str, Ranges]] = [("textbook formula", textbook_range)]
    if importlib.util.find_spec("hf_mem") is not None:
        found.append(("hf-mem, divided by the ranks", hf_mem_range))
    return found


def hf_mem_range(row: dict[str, Any], figure: str) -> tuple[float, float]:
    """What hf-mem's estimate of one request's cache gives for a row; nothing where it cannot read the config."""
    module = importlib.import_module("hf_mem.safetensors.kv_cache")
    config = config_of(row["cfg"])
    counts = config.get("layer_types_count")
    if counts is not None:
        config["layer_types"] = [name for name, count in counts.items() for _ in range(count)]
    length = row["max_model_len"] or 4096
    dtype = "F8_E4M3" if (row["kv_dtype"] or "").startswith(("fp8", "int8")) else "BF16"
    try:
        request = module.compute_safetensors_kv_cache_size(config, dtype, length) / (row["tp"] or 1)
    except (KeyError, TypeError, ZeroDivisionError):
        return 0.0, 0.0
    if figure == "kv_pool_gib":
        gib = row["kv_tokens"] * request / length / GIB
        return round(gib, 2) - 0.005, round(gib, 2) + 0.005
    block = row["block_size"] or 16
    if figure == "cpu_blocks":
        blocks = row["swap_space_gib"] * GIB // (request / length * block)
        return blocks, blocks
    ends: list[float] = []
    for slack in (-0.005, 0.005):
        requests = (row["available_kv_gib"] + slack) * GIB / request
        tokens = requests * length
        ends.append(
            {
                "num_blocks": tokens // block,
                "kv_tokens": tokens // block * block,
                "max_concurrency": round(requests, 2),
            }[figure]
        )
    return ends[0], ends[1]


if __name__ == "__main__":
    sys.exit(main())
