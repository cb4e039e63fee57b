"""What is known to be judged wrongly: misses.json, a row for each variant of an incident, with the reason.

python -m tests.quality.corpus.misses brings the rows up to date, keeps the reasons, and names the rows that lack one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kvdiag.model import Diagnosis
from tests.quality.corpus.incidents import INCIDENTS
from tests.quality.corpus.score import Expected, Scored, Variant, answer, answers, expectations, messages, score

TABLE = Path(__file__).with_name("misses.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """One variant of an incident that is not judged as it should be, and what is called of it without reason."""

    incident: str
    variant: str
    mark: str
    wrong: tuple[str, ...] = ()
    why: str = ""


def listed() -> tuple[Miss, ...]:
    """The known misses."""
    return tuple(Miss(**{**row, "wrong": tuple(row["wrong"])}) for row in json.loads(TABLE.read_text()))


def misses(incident: str, given: Mapping[Variant, Diagnosis]) -> tuple[Miss, ...]:
    """The misses that there are among the diagnoses of its variants, without their reasons."""
    expected: Expected = expectations()[incident]
    scored: list[Scored] = [score(incident, variant, expected, answer(made)) for variant, made in given.items()]
    return tuple(
        Miss(incident=incident, variant=one.variant, mark=one.mark, wrong=one.wrong)
        for one in scored
        if one.mark not in {"right", "honest"} or one.wrong
    )


def main() -> int:
    """Bring the table up to date."""
    reasons = {(one.incident, one.variant): one.why for one in listed()} if TABLE.exists() else {}
    rows = [
        {**asdict(one), "why": reasons.get((one.incident, one.variant), "")}
        for incident in INCIDENTS.values()
        for one in misses(incident.id, answers(incident, messages(), *incident.recording().play()))
    ]
    TABLE.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")
    for row in rows:
        if not row["why"]:
            sys.stdout.write(f"{row['incident']} ({row['variant']}): no reason\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
