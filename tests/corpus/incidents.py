"""All reported incidents of the corpus, by id."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.corpus.baseline_incidents import BASELINE_INCIDENTS
from tests.corpus.benign_incidents import BENIGN_INCIDENTS
from tests.corpus.device_incidents import DEVICE_INCIDENTS
from tests.corpus.host_leaks import HOST_LEAKS
from tests.corpus.incident import Incident
from tests.corpus.kv_incidents import KV_INCIDENTS

INCIDENTS: Mapping[str, Incident] = MappingProxyType(
    {
        one.id: one
        for one in (*HOST_LEAKS, *DEVICE_INCIDENTS, *KV_INCIDENTS, *BASELINE_INCIDENTS, *BENIGN_INCIDENTS)
    }
)
