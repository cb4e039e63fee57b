"""Servers in any trouble, as a strategy, and how many of them a test looks at."""

from hypothesis import settings
from hypothesis import strategies as st

from kvdiag.diagnosis.steps import STEPS
from tests.builders.values import GIB, GPU_LOST, MIB, NO_NVML, OOM, OOM_WITH_ROOM, pool, process
from tests.builders.worlds import SMALL_POOL, TRAINING, World

STEP_IDS = tuple(step.id for step in STEPS)


def bytes_or_none(most: int) -> st.SearchStrategy[int | None]:
    """A size, or `None`: not reported."""
    return st.none() | st.integers(0, most)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any server in any trouble, several troubles at once among them."""
    pools = draw(
        st.sampled_from(
            [
                (pool(),),
                (pool(pool_bytes=None),),
                (pool(sliding_window_tokens=512),),
                (pool(usage_blocks=6145),),
                (pool("0"), pool("1")),
                (SMALL_POOL,),
                (),
            ]
        )
    )
    return World(
        pools=pools,
        gpus=draw(st.integers(1, 3)),
        device_bytes=80 * GIB,
        driver_reserved_bytes=draw(st.sampled_from([464 * MIB, None])),
        weights_bytes=draw(bytes_or_none(12 * GIB)),
        held_at_start_blocks=draw(st.sampled_from([0, 0, 7])),
        leaked_blocks_per_request=draw(st.sampled_from([0, 0, 1, 9])),
        extra_blocks_per_request=draw(st.sampled_from([0, 0, 1, 40])),
        first_touch_bytes=tuple(draw(st.lists(st.integers(0, 200 * MIB), max_size=4))),
        device_growth_bytes=draw(st.sampled_from([0, 0, 3 * MIB])),
        agents=draw(st.booleans()),
        torch_growth_bytes=draw(st.sampled_from([0, 0, 3 * MIB])),
        outside_reported=draw(st.booleans()),
        foreign=draw(st.sampled_from([{}, {0: (TRAINING,)}, {1: (process(7, None),)}, {2: (TRAINING,)}])),
        foreign_growth_bytes=draw(st.sampled_from([{}, {0: 8 * MIB, 2: 8 * MIB}])),
        zombie_bytes=draw(st.sampled_from([0, 0, 2 * GIB])),
        server_seen=draw(st.booleans()),
        processes_reported=draw(st.booleans()),
        server_bytes_reported=draw(st.booleans()),
        memory_reported=draw(st.sampled_from([True, True, False])),
        nvml=draw(st.sampled_from([None, None, NO_NVML, GPU_LOST])),
        resident_at_once=draw(st.sampled_from([None, None, 6])),
        preemptions=draw(st.sampled_from([0, 0, 4])),
        failing=draw(st.sampled_from([{}, {}, {"long_context": OOM}, {"concurrent": OOM_WITH_ROOM}])),
        other_prompt_tokens=draw(st.sampled_from([{}, {"concurrent": 9}])),
        unseen=draw(st.sampled_from([(), ("single_request",), ("concurrent", "long_context")])),
        busy=draw(st.sampled_from([False, False, False, True])),
        cut_short_in=draw(st.sampled_from([None, None, *STEP_IDS[1:]])),
        lost_in=draw(st.sampled_from([None, None, None, *STEP_IDS[1:]])),
        usage_reported=draw(st.sampled_from([True, True, True, False])),
    )


few = settings(max_examples=25, deadline=None)
"""A run of the builders takes some ten milliseconds, and more on a busy machine."""
