"""Lists the series of a window. A list that is too much is divided, by metrics and then by targets.

Most lists fit in one answer. A larger one is halved until each part fits: first the selectors, then the metrics of one.
If a single metric is still too much, most likely one target has a label that changes with each request. The targets are
known from their other metrics, so the metric is listed for some of them at a time, and finally for all others. What is
too much for one target is left out, with the reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvdiag.formatting import format_count
from kvdiag.sources.http import TooMuchError
from kvdiag.sources.prometheus_answers import Labels
from kvdiag.sources.prometheus_api import PrometheusSource
from kvdiag.sources.promql import any_of, named, selector

NAMES_AT_ONCE = 200
"""Values that one matcher names: 1,000 pods take five queries of 8 KB."""

SELECTORS_AT_ONCE = 16
"""Of one list of series."""

MAX_DIVISIONS = 32
"""Lists that are too much, after which no further one is divided; each takes up to 24 MiB.

3,000 replicas need four. A metric with too many series at one target of 200 needs 17.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Series to be listed: those of some metrics that a matcher selects, of all targets or of some."""

    names: tuple[str, ...]
    matcher: str = ""
    instances: tuple[str, ...] | None = None
    others: bool = False
    """Whether the targets are all except `instances`."""

    @property
    def selector(self) -> str:
        """In PromQL."""
        targets = "" if self.instances is None else any_of("instance", self.instances)
        return selector(named(self.names), self.matcher, targets.replace("=~", "!~", 1) if self.others else targets)

    def halves(self) -> Sequence["Listing"]:
        """Two that together select the same; none for one metric of all targets, of one, or of all except some."""
        if len(self.names) > 1:
            middle = len(self.names) // 2
            return [replace(self, names=names) for names in (self.names[:middle], self.names[middle:])]
        if self.instances is None or self.others or len(self.instances) == 1:
            return ()
        middle = len(self.instances) // 2
        return [replace(self, instances=some) for some in (self.instances[:middle], self.instances[middle:])]

    def by_target(self, instances: Sequence[str]) -> Sequence["Listing"]:
        """Several that together select the same: some of these targets each, and all others; none without targets."""
        some = [instances[start : start + NAMES_AT_ONCE] for start in range(0, len(instances), NAMES_AT_ONCE)]
        parts = [replace(self, instances=tuple(one)) for one in some]
        return [*parts, replace(self, instances=tuple(instances), others=True)] if parts else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlisted:
    """A list of series that is too much and cannot be divided, and why."""

    listing: Listing
    problem: str

    @property
    def instance(self) -> str | None:
        """Its only target; `None` if it has several or they are unknown."""
        one = self.listing
        return one.instances[0] if one.instances is not None and not one.others else None

    @property
    def reason(self) -> str:
        """In one sentence."""
        where = "" if self.instance is None else f" at instance {self.instance}"
        return f"the series of {self.listing.names[0]}{where} cannot be listed: {self.problem}"


class SeriesList:
    """Lists the series of one window of a server."""

    def __init__(self, source: PrometheusSource, start_seconds: float, end_seconds: float) -> None:
        """List series that may have samples between two times."""
        self._source, self._start_seconds, self._end_seconds = source, start_seconds, end_seconds
        self._divisions = 0
        self.unlisted: list[Unlisted] = []
        """What is left out so far."""

    async def of(self, listings: Iterable[Listing]) -> set[Labels]:
        """The series of all listings, except for those that are left out.

        Raises:
            Unreadable: no answer, an error, or too much in total.
        """
        wanted = list(listings)
        found: set[Labels] = set()
        left = [wanted[start : start + SELECTORS_AT_ONCE] for start in range(0, len(wanted), SELECTORS_AT_ONCE)]
        # Divided last, when the other metrics have shown the targets.
        too_much: list[Unlisted] = []
        while left or too_much:
            if not left:
                one = too_much.pop()
                left += [[part] for part in one.listing.by_target(sorted(set(map(_instance, found))))]
                self.unlisted += [] if left else [one]
                continue
            some = left.pop()
            try:
                answer = await self._source.series(
                    [one.selector for one in some], self._start_seconds, self._end_seconds
                )
            except TooMuchError as error:
                self._divisions += 1
                if self._divisions > MAX_DIVISIONS:
                    problem = f"{error} ({format_count(MAX_DIVISIONS)} parts of the list were too much)"
                    raise TooMuchError("failed", problem) from error
                middle = len(some) // 2
                if parts := [some[:middle], some[middle:]] if middle else [[half] for half in some[0].halves()]:
                    left += parts
                else:
                    lost = Unlisted(listing=some[0], problem=str(error))
                    (too_much if some[0].instances is None else self.unlisted).append(lost)
                continue
            found.update(answer)
        return found


def _instance(series_id: Labels) -> str:
    return dict(series_id).get("instance", "")
