"""All reported incidents of the corpus, by id."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.quality.corpus.allocation_incidents import ALLOCATOR_INCIDENTS, CRASH_INCIDENTS
from tests.quality.corpus.baseline_incidents import BASELINE_INCIDENTS
from tests.quality.corpus.benign_incidents import BENIGN_INCIDENTS
from tests.quality.corpus.engine_incidents import ENGINE_INCIDENTS
from tests.quality.corpus.growth_incidents import DEVICE_LEAKS, HOST_LEAKS
from tests.quality.corpus.incident import Incident, Record
from tests.quality.corpus.kv_incidents import KV_INCIDENTS

_RECORDS: Mapping[str, Record] = {
    **HOST_LEAKS,
    **DEVICE_LEAKS,
    **ALLOCATOR_INCIDENTS,
    **CRASH_INCIDENTS,
    **KV_INCIDENTS,
    **BASELINE_INCIDENTS,
    **BENIGN_INCIDENTS,
    **ENGINE_INCIDENTS,
}
_REPORTS: Mapping[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""The other fields of every `Incident`."""

INCIDENTS: Mapping[str, Incident] = MappingProxyType(
    {name: Incident(id=name, record=record, **_REPORTS[name]) for name, record in _RECORDS.items()}
)
