"""What a world is: a server with a known truth, and the verdict that is right about it, stated before it is judged."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvdiag.model import Facts, Timeline
from tests.quality.corpus.tape import Tape

Right = Literal["fault", "suspect", "benign", "unknown"]
"""`fault`: only a fault is right. `suspect`: a suspect is right as well. `benign`: nothing may be called. `unknown`:
the whole must not be ok, and no fault may be called."""

DEVICE_LEAKS = ("leak.device_torch", "leak.device_non_torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A server with a known truth.

    Any of `accept` is the right verdict; `also` is true of it as well, and no answer. `row` groups worlds of one kind.
    The truth begins at `onset_hours`; `mib_per_hour` is the rate of a leak.
    """

    name: str
    row: str
    right: Right
    hours: float
    make: Callable[[Tape], tuple[Timeline, Facts]]
    accept: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    onset_hours: float = 0.0
    mib_per_hour: float | None = None
    gpus: int = 1

    def play(self, seed: int) -> tuple[Timeline, Facts]:
        """Its timeline and facts, always the same for a seed."""
        return self.make(Tape(f"world {self.name} {seed}", hours=self.hours))
