"""The cost model of a running server: its model's config, under settings that meet the engine's own figures.

What the engine does not report (bytes of a block, blocks that tokens hold) comes from here, and what it does report is
checked here: concurrency and tokens (`vllm:cache_config_info`, since 0.24), and the number of blocks where the pool's
bytes are reported. Settings that are not reported are tried, the usual ones first; the candidate with the least drift
is taken, and if it has any, the tokens in flight are solved for. With drift left, without the number of ranks, or where
the format depends on a GPU's generation that no figure shows, bytes are unknown rather than guessed. Results are
cached, since every diagnosis asks for the same server.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from kvdiag.errors import KvModelError
from kvdiag.kv.calibration.drift_reasons import explain
from kvdiag.kv.calibration.engine_report import DRIFT_LIMIT_RATIO, EngineReport, EngineSettings, page_report
from kvdiag.kv.calibration.predicted_vs_reported import Calibration, Comparison, Expected, capacity_comparisons
from kvdiag.kv.calibration.running_server import reported_blocks
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.layout.capacity import CacheLayout
from kvdiag.kv.layout.deployment import USUAL_BATCHED_TOKENS, Deployment, deployed_layout
from kvdiag.kv.layout.kernel_blocks import Platform, is_indexed
from kvdiag.kv.layout.layers import Architecture, CompressedLayer
from kvdiag.kv.layout.pages import RequestTerms, StateCacheMode
from kvdiag.kv.layout.residency import content_bytes, decode_blocks
from kvdiag.model import Facts

MAX_IN_FLIGHT_TOKENS = 1 << 20

GENERATIONS = (90, 100, 120)
"""Compute capabilities tried for a model whose cache format differs between them."""

RANKS = (1, 2, 4, 8, 16)
"""Tensor-parallel sizes tried where they are not reported and the pool's bytes show them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server's cache by its model's config. `block_bytes` is per rank, `None` where the ranks are not known, or where
    it depends on the GPU's generation, which no figure shows (`generation_open`).

    `planned_blocks` is what the engine plans for one request of max_model_len tokens. `assumed` names, for a person,
    the settings that no figure of the engine contradicts and none states.
    """

    architecture: Architecture
    deployment: Deployment
    layout: CacheLayout
    block_bytes: int | None
    planned_blocks: int
    figures: tuple[Comparison, ...]
    assumed: str
    generation_open: bool = False

    def drift(self, most_ratio: float = DRIFT_LIMIT_RATIO) -> Comparison | None:
        """The figure that is furthest off, where one is off by more than `most_ratio`; the first of equals."""
        worst = max(self.figures, key=lambda figure: abs(figure.drift_ratio), default=None)
        return worst if worst is not None and abs(worst.drift_ratio) > most_ratio else None

    def held_blocks(self, resident_tokens: int) -> tuple[int, int]:
        """Blocks of a decoding request with so many resident tokens: at least, and at most if freed a step late."""
        held = [
            decode_blocks(self.layout, resident_tokens=resident_tokens, terms=self._terms(steps)) for steps in (0, 1)
        ]
        return min(held), max(held)

    def content_bytes(self, resident_tokens: int) -> int:
        """Bytes that so many resident tokens of a request still need, without tails of blocks and padding."""
        return content_bytes(self.layout, resident_tokens, self._terms(0))

    def _terms(self, steps_in_flight: int) -> RequestTerms:
        terms = self.deployment.request_terms(self.architecture, encoder_tokens=0)
        return replace(terms, steps_in_flight=steps_in_flight)


@lru_cache(maxsize=16)
def served_layout(facts: Facts) -> Served | str:
    """The model of the one pool of these facts; or why there is none, as a clause."""
    report = page_report(facts)
    try:
        architecture = _architecture(facts)
        candidates = _candidates(architecture, report, facts)
        best = min(candidates, key=_distance)
        generation_open = _is_generation_open(best, candidates)
        if _distance(best) > 0:
            best = min(best, _solved(best, report, facts), key=_distance)
    except KvModelError as error:
        return f"the model's config cannot be used: {error}"
    except (ValueError, RecursionError):
        return "the model's config.json is not valid JSON; check the file"
    explained = explain(
        Calibration(comparisons=best.figures), architecture, best.deployment, report, Expected(pool_source="estimate")
    )
    size = None if generation_open else best.block_bytes
    return replace(best, figures=explained.comparisons, block_bytes=size, generation_open=generation_open)


def _architecture(facts: Facts) -> Architecture:
    """The model's layers. Some classes are not modelled as vLLM keeps their cache, and are as other engines do."""
    config = json.loads(facts.model_config or "")
    try:
        return parse_architecture(config)
    except KvModelError as error:
        # Imported for the few servers that need it: the table of flags takes the daemon's memory.
        from kvdiag.kv.pools.flag_bounds import ENGINE_FLAGS  # noqa: PLC0415

        if error.field != "architectures" or facts.engine_name not in ENGINE_FLAGS:
            raise
        return parse_architecture(config, by_vllm=False)


def _is_generation_open(best: Served, candidates: Sequence[Served]) -> bool:
    """Whether GPUs of several generations meet the engine's figures alike, with blocks of different sizes."""
    alike = {
        one.layout.bytes_per_block
        for one in candidates
        if _distance(one) == _distance(best)
        and replace(one.deployment, compute_capability=best.deployment.compute_capability) == best.deployment
    }
    return len(alike) > 1


def _generations(architecture: Architecture, platform: Platform) -> Sequence[int | None]:
    ring = any(isinstance(layer, CompressedLayer) and layer.ring for layer in architecture.layers)
    differ = ring or is_indexed(architecture)
    return GENERATIONS if differ and platform is Platform.CUDA else (None,)


def _deployments(architecture: Architecture, facts: Facts, settings: EngineSettings) -> Iterator[Deployment]:
    """The settings that an engine with this pool may have, the usual ones first."""
    (pool,) = facts.pools
    mode = None if settings.state_cache_mode is None else StateCacheMode(settings.state_cache_mode)
    reported = facts.tensor_parallel
    for ranks in (reported,) if reported is not None else RANKS if pool.pool_bytes is not None else (1,):
        for platform in (Platform.CUDA, Platform.CPU):
            for batched, generation in product(USUAL_BATCHED_TOKENS, _generations(architecture, platform)):
                yield Deployment(
                    tensor_parallel=ranks,
                    pipeline_parallel=facts.pipeline_parallel or 1,
                    block_size_tokens=pool.block_tokens,
                    kv_dtype=pool.cache_dtype or "auto",
                    state_dtype=settings.state_dtype,
                    state_cache_mode=mode,
                    prefix_caching=pool.prefix_caching is not False,
                    max_num_batched_tokens=batched,
                    platform=platform,
                    compute_capability=generation,
                )


def _candidates(architecture: Architecture, report: EngineReport, facts: Facts) -> list[Served]:
    """What the settings come to that this model can have: 16 ranks do not divide 40 heads.

    Raises:
        KvModelError: it can have none of them.
    """
    found: list[Served] = []
    refused: KvModelError | None = None
    for one in _deployments(architecture, facts, report.settings):
        try:
            found.append(_candidate(architecture, one, report, facts))
        except KvModelError as error:
            refused = refused or error
    if refused is not None and not found:
        raise refused
    return found


def _candidate(architecture: Architecture, deployment: Deployment, report: EngineReport, facts: Facts) -> Served:
    (pool,) = facts.pools
    layout = deployed_layout(architecture, deployment)
    sizes = set(layout.bytes_per_block)
    size = sizes.pop() if len(sizes) == 1 else None
    known = facts.tensor_parallel is not None or pool.pool_bytes is not None
    return Served(
        architecture=architecture,
        deployment=deployment,
        layout=layout,
        block_bytes=size if known or _same_on_all_ranks(architecture, deployment, size) else None,
        planned_blocks=layout.admission_blocks(facts.max_model_len_tokens or 1, deployment.request_terms(architecture)),
        figures=capacity_comparisons(architecture, deployment, report),
        assumed=f"max_num_batched_tokens {deployment.max_num_batched_tokens}, {deployment.platform} kernels",
    )


def _distance(candidate: Served) -> float:
    return sum(abs(figure.drift_ratio) for figure in candidate.figures)


def _same_on_all_ranks(architecture: Architecture, deployment: Deployment, size: int | None) -> bool:
    """Whether a block costs the same however the model is divided: latent attention is kept whole on every rank."""
    try:
        halved = deployed_layout(architecture, replace(deployment, tensor_parallel=2))
    except KvModelError:
        return False
    return set(halved.bytes_per_block) == {size}


def _solved(candidate: Served, report: EngineReport, facts: Facts) -> Served:
    """The same with the tokens in flight that give the blocks reported for one request, found by bisection.

    Windowed layers plan a window and what is in flight (`pages.py`), so blocks grow with it. Where no number of tokens
    gives the reported blocks the answer is as far off as before.
    """
    wanted, longest_tokens = reported_blocks(facts.pools[0]), facts.max_model_len_tokens
    if wanted is None or longest_tokens is None:
        return candidate
    low, high = 1, MAX_IN_FLIGHT_TOKENS
    while low < high:
        midpoint = (low + high) // 2
        terms = replace(candidate.deployment, max_in_flight_tokens=midpoint).request_terms(candidate.architecture)
        enough = candidate.layout.admission_blocks(longest_tokens, terms) >= wanted
        low, high = (low, midpoint) if enough else (midpoint + 1, high)
    deployment = replace(candidate.deployment, max_in_flight_tokens=low)
    found = _candidate(candidate.architecture, deployment, report, facts)
    return replace(found, assumed=f"{low} tokens in flight, {deployment.platform} kernels")
