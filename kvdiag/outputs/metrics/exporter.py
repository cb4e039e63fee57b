"""The metrics endpoint's answer: a stateless collector over the newest snapshot; absent things have no series.

Names and labels are a contract with the rules and dashboards. Texts from outside are cut, cleaned and bounded in
number; vLLM's own series are not repeated.
"""

from collections.abc import Callable, Collection, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import kvdiag
from kvdiag.model import Snapshot
from kvdiag.outputs.current_verdict import as_of_now
from kvdiag.outputs.metrics.devices import device_figures, ledger_figures, torch_figures
from kvdiag.outputs.metrics.diagnosis_metrics import diagnosis_figures, source_figures
from kvdiag.outputs.metrics.engine_metrics import engine_figures, server_figures
from kvdiag.outputs.metrics.families import Figures, contract, family


class SnapshotCollector(Collector):
    """Turns the newest snapshot into metric families at each scrape."""

    def __init__(self, newest: Callable[[], Snapshot], names: Collection[str]) -> None:
        """Call `newest` at each scrape; it must return at once."""
        self._newest = newest
        self._names = names

    def collect(self) -> Iterator[Metric]:
        """The families of the page; only those with series of the requested names, if any are requested."""
        for one in families(self._newest()):
            if self._names:
                one.samples = [sample for sample in one.samples if sample.name in self._names]
            if one.samples or not self._names:
                yield one


def registry(newest: Callable[[], Snapshot], names: Collection[str] = ()) -> CollectorRegistry:
    """A registry of this collector alone, which is not called when it is made; of some series if they are named."""
    made = CollectorRegistry(auto_describe=False)
    made.register(SnapshotCollector(newest, names))
    return made


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Every family of a snapshot; what was not observed has no series."""
    figures: Figures = {
        "build_info": [((kvdiag.__version__,), 1.0)],
        **server_figures(snapshot),
        **device_figures(snapshot.newest),
        **ledger_figures(snapshot),
        **torch_figures(snapshot.newest),
        **engine_figures(snapshot.newest, snapshot.facts),
        **diagnosis_figures(as_of_now(snapshot), snapshot.diagnosed_seconds),
        **source_figures(snapshot),
    }
    for name in contract():
        yield family(name, figures)
