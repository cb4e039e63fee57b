"""Slots of recurrent layers' states, of which each request of a hybrid model takes one: a pool of their own."""

from kvdiag.diagnosis.limits import Limits
from kvdiag.diagnosis.timeline_queries import IdleFloor, idle_floors
from kvdiag.formatting import plural
from kvdiag.model import Facts, Span, Timeline


def slots_in_use(slots: int) -> str:
    """The sentence on slots that no request can hold."""
    return f"{plural(slots, 'state slot')} of recurrent layers still in use while idle"


def newest_slots(floors: tuple[IdleFloor, ...]) -> int | None:
    """Slots in use at the end of the newest idle interval; `None` where it does not show them."""
    return floors[-1].state_slots if floors else None


def slots_before(floors: tuple[IdleFloor, ...]) -> int:
    """Slots in use at the end of the newest idle interval that shows them; 0 where none does."""
    return next((one.state_slots for one in reversed(floors) if one.state_slots is not None), 0)


def slots_kept(timeline: Timeline, facts: Facts, first: Span, last: Span, limits: Limits) -> int:
    """Slots that requests from one span to another left in use; 0 where that is not reported."""
    end_seconds = last.begin_seconds if last.end_seconds is None else last.end_seconds
    floors = [
        floor
        for floor in idle_floors(timeline, facts, limits)
        if floor.state_slots is not None and first.begin_seconds <= floor.at_seconds <= end_seconds
    ]
    return max((floors[-1].state_slots or 0) - (floors[0].state_slots or 0), 0) if floors else 0
