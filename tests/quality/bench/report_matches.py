"""How many known reports a reported server matches in addition to its own, and how many of those anything contradicts.

python -m tests.quality.bench.report_matches
"""

import sys
from collections import Counter

from kvdiag.diagnosis.prescriptions.known_reports import every_report
from kvdiag.diagnosis.prescriptions.report_matching import is_affected
from tests.unit.diagnosis.prescriptions.reported import servers


def main() -> None:
    """Print the counts, and each server with what it matches."""
    write = sys.stdout.write
    entries = {one.id: one for one in every_report()}
    counts: Counter[str] = Counter()
    for server in servers():
        matched = server.matched()
        own = {one.id for one in server.own}
        counts["servers"] += 1
        counts["match their own report"] += bool(own & {one.id for one in matched})
        others = [one for one in matched if one.id not in own]
        for one in others:
            entry = entries[one.id]
            wrong = (
                server.facts.engine_name not in entry.engines
                or server.verdict not in entry.verdicts
                or is_affected(entry, server.facts.engine_version) is False
            )
            counts["other reports, contradicted by engine, version or verdict"] += wrong
            counts["other reports, certain" if one.certain else "other reports, possible"] += 1
        listed = ", ".join(f"{one.id}{'' if one.certain else '?'}" for one in others)
        write(f"{server.incident:42} {len(own)} of its own; others: {listed or 'none'}\n")
    for name in (
        "servers",
        "match their own report",
        "other reports, contradicted by engine, version or verdict",
        "other reports, certain",
        "other reports, possible",
    ):
        write(f"{name}: {counts[name]}\n")


if __name__ == "__main__":
    main()
