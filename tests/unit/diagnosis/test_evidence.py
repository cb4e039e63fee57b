"""Each row of evidence with its unit and source: `world | id | name | value | unit | source`.

The figures of histories (tests/golden/figures) leave the sources out. `pytest --update-golden` rewrites the file.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.fleet import compare
from kvdiag.model import Finding
from tests.builders.runs import judged
from tests.builders.series import device_part, hidden_device_part, host_part, neighbour_part, timeline, torch_part
from tests.builders.soak_timeline import SOAKS, facts_of, soak
from tests.builders.worlds import World, facts
from tests.golden.record import cases
from tests.golden.test_wording import WORLDS
from tests.unit.diagnosis.fleet.replicas import LIVE, replicas

PARTS = {
    "torch's live bytes": LIVE,
    "torch's cache": torch_part(reserved=True),
    "beside torch": torch_part(outside=True),
    "the process": device_part,
    "a neighbour": neighbour_part,
    "the device": hidden_device_part,
    "the host": host_part,
}


def watched() -> Iterator[tuple[str, Iterable[Finding]]]:
    """Memory that grows by 200 MB an hour, as each source sees it; and 60 MB an hour in one of two versions."""
    for name, part in PARTS.items():
        seen = timeline("filled cache", hours=6.5, tick_seconds=120.0, leak_mb_per_hour=200.0, part=part)
        yield f"watched: {name}", diagnose(seen, facts(World())).findings
        fleet = [replicas(6, name="filled cache", leak=leak, part=part, version=f"{leak}") for leak in (0.0, 60.0)]
        yield f"fleet: {name}", compare(chain(*fleet)).findings


def rows(told: Mapping[str, Iterable[Finding]]) -> str:
    """One line for each row, under the first name that shows it."""
    found: dict[str, str] = {}
    for name, said in told.items():
        for one in said:
            for row in one.evidence:
                # Further digits of so small a p-value are the platform's.
                least = 1e-6 if row.unit == "p-value" else -math.inf
                value = f"{max(row.value, least):.5g}" if isinstance(row.value, float) else row.value
                found.setdefault(f"{one.id} | {row.name} | {value} | {row.unit} | {row.source}", name)
    return "".join(f"{name} | {line}\n" for line, name in found.items())


def test_evidence_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    """Every row's name, value, unit and source."""
    runs = {name: judged(world) for name, world in WORLDS.items()}
    runs |= {name: diagnose(*case) for name, case in cases().items()}
    runs |= {f"soak: {name}": diagnose(soak(seen), facts_of()) for name, seen in SOAKS.items()}
    golden("diagnosis/evidence.txt", rows({name: one.findings for name, one in runs.items()} | dict(watched())))
