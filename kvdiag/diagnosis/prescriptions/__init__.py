"""The fix of a verdict, computed for this server: which flag to set to what, what it buys and what it costs. Pure.

Each function answers one question of the rules: how a pool holds more requests or a longer one (`pool_room`), how more
of the device stays free (`device_room`). The figures are those of the running server, and the changes are found by
`kvdiag.kv.fit.scenario`, as for `kvdiag fit`. Order of least harm: settings before hardware, those that end the finding
before those that make it smaller, and then by what they cost those who send requests. A change that the engine has no
flag for is left out; one that cannot be computed is among `missing`, with how to get its figure. Last come the public
reports of defects that the finding and the server match (`report_matching`).

The modules are imported for the first verdict that needs them: a daemon that watches a healthy server never does, and
the cost model of `fit` would take 1 MiB of its memory.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = [
    "for_context",
    "for_requests",
    "joined_holes",
    "memory_won_back",
    "smaller_pool",
    "with_known_reports",
    "with_room_for",
]


def _later(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)(*arguments, **named)

    return call


if TYPE_CHECKING:
    from kvdiag.diagnosis.prescriptions.device_room import joined_holes, memory_won_back, smaller_pool, with_room_for
    from kvdiag.diagnosis.prescriptions.pool_room import for_context, for_requests
    from kvdiag.diagnosis.prescriptions.report_matching import with_known_reports
else:
    joined_holes, memory_won_back, smaller_pool, with_room_for = (
        _later("device_room", name) for name in ("joined_holes", "memory_won_back", "smaller_pool", "with_room_for")
    )
    for_context, for_requests = (_later("pool_room", name) for name in ("for_context", "for_requests"))
    with_known_reports = _later("report_matching", "with_known_reports")
