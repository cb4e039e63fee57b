"""The wording of every finding and step, in files that are reviewed as text: `world | id | status | summary`.

Active runs and recorded traces are in `diagnosis/findings.txt`, every recorded failure text and log in
`diagnosis/postmortem.txt`. `pytest --update-golden` rewrites both.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvdiag.diagnosis import diagnose
from kvdiag.model import Diagnosis, Finding, StepResult
from kvdiag.outputs.presentation import fixes
from tests.builders.runs import judged, run
from tests.builders.values import GIB, MIB, NO_NVML, OOM, OOM_WITH_ROOM, pool
from tests.builders.worlds import TRAINING, World, facts
from tests.golden.record import cases
from tests.unit.diagnosis.postmortem.rendered import LOGS, TEXTS, rendered
from tests.unit.diagnosis.prescriptions.crowded_server import LLAMA, SIX

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


CROWDED = World(pools=(SIX,), max_model_len_tokens=8_192, resident_at_once=6, preemptions=5, device_bytes=20 * GIB)
SMALL = pool(usable_blocks=1250, pool_bytes=None, capacity_tokens=20_016, max_concurrency=1251 / 2048)
SERVED = {"model_config": LLAMA, "tensor_parallel": 1, "pipeline_parallel": 1}

PRESCRIBED: dict[str, tuple[World, dict[str, object]]] = {
    "crowded": (CROWDED, SERVED),
    "crowded-config-unknown": (CROWDED, {}),
    "crowded-no-nvml": (replace(CROWDED, nvml=NO_NVML), SERVED),
    "crowded-sglang": (CROWDED, {"engine_name": "sglang"}),
    "crowded-llamacpp": (CROWDED, {"engine_name": "llamacpp"}),
    "crowded-trtllm": (CROWDED, {"engine_name": "trtllm"}),
    "context-beyond-the-pool": (World(pools=(SMALL,)), SERVED),
    "no-room-for-a-long-prompt": (World(failing={"long_context": OOM}), SERVED),
    "the-same-on-sglang": (World(failing={"long_context": OOM}), {"engine_name": "sglang"}),
    "message-without-figures": (World(failing={"long_context": OOM[: OOM.index(" GPU 0")]}), SERVED),
    "fragmented": (World(failing={"concurrent": OOM_WITH_ROOM}), {}),
    "step-too-large": (World(failing={"concurrent": OOM}), SERVED),
    "another-process": (World(foreign={0: (TRAINING,)}, device_bytes=32 * GIB), SERVED),
    "another-process-bytes-unknown": (World(pools=(SMALL,), foreign={0: (TRAINING,)}, device_bytes=32 * GIB), {}),
    "weights-twice": (World(overhead_bytes=8 * GIB, device_bytes=48 * GIB), SERVED),
    "one-rank-more": (World(gpus=2, rank_extra_bytes={1: 3 * GIB}), {**SERVED, "tensor_parallel": 2}),
    "one-stage-more": (World(gpus=2, rank_extra_bytes={1: 3 * GIB}), {"pipeline_parallel": 2}),
    "more-blocks-than-tokens": (World(extra_blocks_per_request=200), SERVED),
    "tight": (World(device_bytes=20 * GIB - 400 * MIB), SERVED),
}
"""Worlds with a fix, and what else is known of their servers."""


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


def test_prescriptions_are_worded_as_reviewed(golden: Callable[[str, str], None]) -> None:
    """Each change with what it buys and costs, and each figure that is missing, under the first world that shows it."""
    judged_worlds = {
        name: diagnose(run(world), replace(facts(world), **changes))  # type: ignore[arg-type]
        for name, (world, changes) in PRESCRIBED.items()
    }
    found: dict[str, str] = {}
    for world, diagnosis in judged_worlds.items():
        for one in diagnosis.findings:
            for title, change, effect in fixes(one):
                found.setdefault(f"{one.id} | {title} | {change}{f' | {effect}' if effect else ''}", world)
    golden("diagnosis/prescriptions.txt", "".join(f"{world} | {line}\n" for line, world in found.items()))


def test_postmortems_are_worded_as_reviewed(golden: Callable[[str, str], None]) -> None:
    """What is read of each recorded failure, every verdict on it, and the remedy in bytes."""
    golden("diagnosis/postmortem.txt", "\n\n".join(f"# {name}\n{rendered(name)}" for name in (*TEXTS, *LOGS)) + "\n")
