"""What SGLang's check of its pools printed in each range of versions, and how many units are lost by it."""

import pytest

from kvdiag.diagnosis.postmortem import postmortem
from kvdiag.oom.log import read_failures
from tests.unit.diagnosis.postmortem.cases import case_of

# By invariant_checker.py of 0.5.23, and by public logs of the versions before it.
OLDEST = (
    "token_to_kv_pool_allocator memory leak detected! available_size={}, protected_size=0, {}max_total_num_tokens=8192"
)
OLDER = (
    "token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens=8192, available_size=8000, "
    "evictable_size={}, protected_size=0"
)
FULL = "[full] total=8192, available=8000, evictable={}, protected=0, session_held=0, uncached=0"
SLOTS = "req_to_token_pool memory leak detected!available_size={}, total_size=2048"
STATES = (
    "token_to_kv_pool_allocator memory leak detected! "
    "full_available_size=8000, full_evictable_size=192, self.token_to_kv_pool_allocator.size=8192{}"
    "mamba_available_size=30, mamba_evictable_size=9, self.req_to_token_pool.mamba_pool.size=40, "
    "leaked_mamba_pages={{7}}"
)
WORDINGS = {
    "0.4.9": (OLDEST.format(8000, "self."), {"token pool": 192}),
    "0.4.9 twice": (OLDEST.format(8200, "self."), {"token pool": -8}),
    "0.5.2": (OLDER.format(100), {"token pool": 92}),
    "0.5.2 twice": (OLDER.format(200), {"token pool": -8}),
    "0.5.10 session": (OLDER.format(100) + ", session_held=5", {"token pool": 87}),
    "0.5.12": ("pool memory leak detected! " + FULL.format(100), {"token pool": 92}),
    "0.5.12 twice": ("pool memory leak detected! " + FULL.format(200), {"token pool": -8}),
    "0.5.12 window": (
        f"pool memory leak detected! {FULL.format(192)}\n[swa] total=4096, available=3840, evictable=0, protected=0",
        {"token pool": 0, "sliding-window pool": 256},
    ),
    "0.5.12 joined": (
        f"pool memory leak detected! {FULL.format(192)} [mamba] total=40, available=38, evictable=1, protected=0",
        {"token pool": 0, "state slots": 1},
    ),
    "0.5.6 states": (STATES.format("\n"), {"token pool": 0, "state slots": 1}),
    "0.5.6 joined": (STATES.format(" "), {}),
    "slots": (SLOTS.format(2047), {"request slots": 1}),
    "slots twice": (SLOTS.format(2049), {"request slots": -1}),
    "while busy": ("AssertionError: Full Pool Mem Leak Detected! " + FULL.format(100), {"token pool": 92}),
}
PAGES = (
    "ValueError: KV double free: sub-pool 0 has 7 duplicate pages.",
    "ValueError: KV page use-after-free: 3 owner page refs are in the free pool, sample pages=[17].",
)


@pytest.mark.parametrize(("text", "lost"), WORDINGS.values(), ids=WORDINGS)
def test_each_wording_tells_what_is_lost(text: str, lost: dict[str, int]) -> None:
    """Each is a fault; a count above the size has the other sign, and two pools are never mixed."""
    failure = read_failures(f"ValueError: {text}")
    assert failure is not None
    assert failure.shortage.kind == "kv_lost"
    assert {count.pool: count.lost for count in failure.shortage.counts} == lost
    (finding,) = [one for one in postmortem(case_of(f"ValueError: {text}")).findings if one.id == "leak.kv_blocks"]
    assert finding.status == "fault"
    assert ("released twice" in finding.summary) == any(count < 0 for count in lost.values())


@pytest.mark.parametrize("text", PAGES)
def test_pages_released_twice_are_not_called_lost(text: str) -> None:
    """The checks that name pages count nothing, but show which error it is."""
    (finding,) = [one for one in postmortem(case_of(text)).findings if one.id == "leak.kv_blocks"]
    assert (finding.status, "released twice" in finding.summary) == ("fault", True)
