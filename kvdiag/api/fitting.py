"""Whether a model fits, as a value: the plan of `kvdiag fit`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvdiag.api.checked_arguments import checked
from kvdiag.api.option_values import option_values
from kvdiag.commands.fit import Fitted, command, planned
from kvdiag.commands.fitting.fit_inputs import check_options, files_of
from kvdiag.commands.fitting.fit_options import FitOptions
from kvdiag.errors import KvdiagError
from kvdiag.kv.fit.plan import Outcome, Plan
from kvdiag.kv.fit.scenario import Lever
from kvdiag.kv.pools.flag_bounds import ENGINE_FLAGS

COMMAND_ONLY = frozenset(("gpu", "list_models", "calibrate", "from_log", "kv_pool_bytes", "grid", "access", "output"))
"""What asks for another answer than a plan, or for how it is printed."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Fit:
    """What a deployment gives for a demand. `fitted` is what the command prints."""

    fitted: Fitted

    def __repr__(self) -> str:
        return f"<Fit: {self.plan.outcome.value.replace('_', ' ')}>"

    @property
    def fits(self) -> bool:
        """Whether the demand fits, be it with little to spare."""
        return self.fitted.plan.outcome is not Outcome.DOES_NOT_FIT

    @property
    def plan(self) -> Plan:
        """Blocks, bytes and headroom; the most requests and the longest context."""
        return self.fitted.plan

    @property
    def levers(self) -> tuple[Lever, ...]:
        """Single changes that help, those that make it fit first; none where it fits with room to spare."""
        return self.fitted.levers

    def document(self) -> dict[str, Any]:
        """The JSON document of `kvdiag fit --output json`."""
        return self.fitted.document()


@checked
def fit(model: str | Path, *, gpu: str, **options: Any) -> Fit:
    """Plan a model on a GPU for vLLM, as `kvdiag fit` does.

    Args:
        model: a folder, a config.json, a Hub id, or a name from `kvdiag fit --list`.
        gpu: its name or its memory, such as h100 or 80GB.
        options: as the command's, such as `tp=4`, `context=8192`, `concurrency=32`, `kv_dtype="fp8"`.

    Raises:
        KvdiagError: the model, the GPU or an option cannot be used.
    """
    allowed = {one.name for one in fields(FitOptions)} - COMMAND_ONLY
    given = FitOptions(**option_values(command, options, allowed) | option_values(command, {"gpu": gpu}, {"gpu"}))
    if given.engine in ENGINE_FLAGS:
        raise KvdiagError(f"for {given.engine} use the command: kvdiag fit --engine {given.engine} --output json")
    check_options(given)
    return Fit(fitted=planned(files_of(str(model), given), given, gpu))
