"""The wording of every finding and step, in files that are reviewed as text: `world | id | status | summary`.

Active runs and recorded traces are in `diagnosis/findings.txt`, every recorded failure text and log in
`diagnosis/postmortem.txt`. `pytest --update-golden` rewrites both.
"""

from collections.abc import Callable, Mapping

from kvdiag.diagnosis import diagnose
from kvdiag.model import Diagnosis, Finding, StepResult
from tests.builders.runs import judged
from tests.builders.values import GIB, NO_NVML, OOM, OOM_WITH_ROOM, pool
from tests.builders.worlds import World
from tests.golden.record import cases
from tests.unit.diagnosis.postmortem.rendered import LOGS, TEXTS, rendered

WORLDS: dict[str, World] = {
    "healthy": World(),
    "healthy-with-agents": World(agents=True),
    "no-nvml": World(nvml=NO_NVML),
    "no-pool": World(pools=()),
    "weights-unknown": World(weights_bytes=None),
    "processes-unknown": World(processes_reported=False),
    "server-unknown": World(server_seen=False),
    "usage-unknown": World(usage_reported=False),
    "blocks-leak": World(leaked_blocks_per_request=2),
    "blocks-in-use-at-start": World(held_at_start_blocks=7),
    "blocks-released-late": World(late_blocks=(400, 200, 0)),
    "busy": World(busy=True),
    "other-traffic": World(other_prompt_tokens={"concurrent": 512}),
    "waits": World(resident_at_once=3),
    "preempts": World(resident_at_once=3, preemptions=4),
    "cut-short": World(cut_short_in="concurrent"),
    "server-lost": World(lost_in="concurrent"),
    "unseen": World(unseen=("long_context",)),
    "no-room": World(failing={"single_request": OOM}),
    "fragmented": World(failing={"concurrent": OOM_WITH_ROOM}),
    "uneven-pools": World(pools=(pool("0"), pool("1", usable_blocks=3000)), gpus=2),
    "tight": World(device_bytes=20 * GIB),
}


def lines(diagnoses: Mapping[str, Diagnosis]) -> str:
    """One line for each step and finding, under the first world that shows it."""
    found: dict[str, str] = {}
    for world, diagnosis in diagnoses.items():
        told: list[Finding | StepResult] = [*diagnosis.steps, *diagnosis.findings]
        for one in told:
            found.setdefault(f"{one.id} | {one.status} | {one.summary}", world)
    return "".join(f"{world} | {line}\n" for line, world in found.items())


def test_findings_and_steps_are_worded_as_reviewed(golden: Callable[[str, str], None]) -> None:
    """Every world of the builders, and every trace that the golden verdicts are made of."""
    recorded = {name: diagnose(*case) for name, case in cases().items()}
    golden("diagnosis/findings.txt", lines({name: judged(world) for name, world in WORLDS.items()} | recorded))


def test_postmortems_are_worded_as_reviewed(golden: Callable[[str, str], None]) -> None:
    """What is read of each recorded failure, every verdict on it, and the remedy in bytes."""
    golden("diagnosis/postmortem.txt", "\n\n".join(f"# {name}\n{rendered(name)}" for name in (*TEXTS, *LOGS)) + "\n")
