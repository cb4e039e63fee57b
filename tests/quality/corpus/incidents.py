"""All reported incidents of the corpus, by id."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.quality.corpus.allocator_incidents import ALLOCATOR_INCIDENTS
from tests.quality.corpus.baseline_incidents import BASELINE_INCIDENTS
from tests.quality.corpus.benign_incidents import BENIGN_INCIDENTS
from tests.quality.corpus.crash_incidents import CRASH_INCIDENTS
from tests.quality.corpus.device_leaks import DEVICE_LEAKS
from tests.quality.corpus.host_leaks import HOST_LEAKS
from tests.quality.corpus.incident import Incident
from tests.quality.corpus.kv_incidents import KV_INCIDENTS

INCIDENTS: Mapping[str, Incident] = MappingProxyType(
    {
        one.id: one
        for group in (
            HOST_LEAKS,
            DEVICE_LEAKS,
            ALLOCATOR_INCIDENTS,
            CRASH_INCIDENTS,
            KV_INCIDENTS,
            BASELINE_INCIDENTS,
            BENIGN_INCIDENTS,
        )
        for one in group
    }
)
