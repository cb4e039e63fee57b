"""What an engine's metrics can show of its KV pool; a verdict that needs more is `unknown`, with the reason."""

from dataclasses import dataclass
from typing import Literal

from kvdiag.model.validation import Checked

Unit = Literal["block", "page", "token", "cell"]
"""What a pool is counted in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities(Checked):
    """What an engine reports, and what its figures count.

    `unit` is what its pool is counted in: block, page, token or cell. `usage`: it reports which share of the pool
    is in use; `blocks`: it reports the pool's size, so that units in use can be counted. `returns`: units that are
    never released stay visible in the usage. `reserved`: the usage counts what a request may need at most, from
    admission to end. `waits`: a request for which the pool has no room waits; if not, all requests that run fail.
    `late_seconds`: while idle, usage and request counts may be this old. `on_completion`: they move only when a
    request ends, and show the step before. `salt`: a cache salt with each
    request keeps tenants' prefixes apart. `forces_length`: a request can demand an exact number of output tokens.
    `renewed_seconds`: usage and request counts are renewed only once in so long, under load, too. `late_tokens`: while
    requests decode, usage may be this many tokens of each behind. `linear`: the pool counts every token of a request
    until it ends, for every kind of layer. `spare_blocks`: a request runs only where so many blocks are free
    beyond what its tokens need.
    """

    unit: Unit = "block"
    usage: bool = True
    blocks: bool = True
    returns: bool = True
    reserved: bool = False
    waits: bool = True
    late_seconds: float = 0.0
    late_tokens: int = 0
    renewed_seconds: float = 0.0
    on_completion: bool = False
    linear: bool = False
    spare_blocks: int = 0
    salt: bool = True
    forces_length: bool = True


ALL = Capabilities()
"""Of an engine that reports everything, as vLLM does."""
