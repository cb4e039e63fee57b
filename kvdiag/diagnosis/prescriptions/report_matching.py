"""Which public reports a finding and its server match. Pure.

A report is left out as soon as anything contradicts it: another verdict, an older version than the first that has the
defect or one with the fix, another connector, a condition that the server is known not to meet, another process, or far
more bytes per request than were reported. What is not known is reported with it: where the version is not reported, or
newer than the newest reported one of a defect without a known fix, the match is possible; a condition becomes an "if".
The order is that of certainty: version known, most conditions met, fewest unknown.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvdiag.diagnosis.growth.host_caches import takes_media
from kvdiag.diagnosis.prescriptions.known_reports import Report, reports_of, vocabulary
from kvdiag.diagnosis.prescriptions.typed_flags import typed
from kvdiag.diagnosis.prescriptions.version_order import order
from kvdiag.engine_features import known_features
from kvdiag.engine_memory import engine_title
from kvdiag.formatting import format_bytes, plural
from kvdiag.model import Facts, Finding, KnownReport, Prescription, Timeline

MAX_REPORTS = 8
MAX_LINKS = 3
LARGER_FACTOR = 30.0
"""More bytes per request than reported, by this factor, are another defect: requests differ by less."""
MAX_RELEASES_LATER = 5
"""Minor releases, or patches of one, after the newest reported one, up to which an unfixed defect is possible."""
MAX_BUILDS_LATER = 2000
"""The same of an engine that numbers its builds: some four months of llama.cpp's."""
MIN_REQUESTS = 100
"""From which the growth per request is worth a comparison."""

_SEVERAL = re.compile(r"multi", re.IGNORECASE)
_OF_METRICS = re.compile(r"[a-z]+")
"""A connector that its metrics alone show: of which kind is not known."""
_NO_VERSION = ((0,), 0, 0, 0, 0)
_OF_V1 = re.compile(r"VLLM::")
"""Only the V1 engine names its processes."""
_RECURRENT = re.compile(r'"(?:linear_attention|mamba\w{0,40}|linear_num_value_heads|ssm_\w{0,40})"')


def with_known_reports(
    finding: Finding, facts: Facts, timeline: Timeline | None = None, *, signs: Sequence[str] = ()
) -> Finding:
    """The finding with the reports that it matches in its prescription; as it is where it is no problem, or none does.

    Args:
        finding: of one of the server's lives.
        facts: the server's.
        timeline: the samples of that life, for the growth per request.
        signs: ids of the reports whose line is in the server's log.
    """
    if finding.status not in ("fault", "suspect"):
        return finding
    per_request = _bytes_per_request(finding, timeline)
    found = [_matched(one, finding, facts, signs, per_request) for one in reports_of(facts.engine_name)]
    matched = sorted((one for one in found if one is not None), key=_rank)[:MAX_REPORTS]
    if not matched:
        return finding
    prescription = finding.prescription or Prescription()
    reports = tuple(matched)
    return replace(
        finding,
        prescription=replace(prescription, known_reports=reports, known_issue=_first_line(reports, facts)),
    )


def is_affected(report: Report, version: str | None) -> bool | None:
    """Whether a version has a report's defect; `None` where that is not known.

    A defect without a known fix without a report for many releases is taken for mended.
    """
    own = order(version)
    if own is None or not report.has_versions:
        return None
    first, last, fixed = (order(one) for one in (report.first, report.last, report.fixed_in))
    if (first is not None and own < first) or (fixed is not None and own >= fixed):
        return False
    if fixed is not None or last is None or own <= last:
        return True if fixed is not None or last is not None else None
    return False if _is_far(own[0], last[0]) else None


def _is_far(release: Sequence[int], last: Sequence[int]) -> bool:
    if len(last) == 1:
        return release[0] - last[0] > MAX_BUILDS_LATER
    (major, minor, patch), (last_major, last_minor, last_patch) = ((*parts, 0, 0)[:3] for parts in (release, last))
    if (major, minor) == (last_major, last_minor):
        # SGLang's releases of a year are patches of one minor release.
        return patch - last_patch > MAX_RELEASES_LATER
    return major != last_major or minor - last_minor > MAX_RELEASES_LATER


def known_conditions(facts: Facts) -> Mapping[str, bool]:
    """The conditions of which it is known whether the server meets them. Of requests' own nothing is known."""
    found: dict[str, bool] = {}
    if facts.features is not None:
        found |= {name: name in facts.features for name in known_features(facts.engine_name)}
        if "graphs_off" in found:
            found["graphs_on"] = not found["graphs_off"]
    if (tensor := facts.tensor_parallel) is not None:
        found["tensor_parallel"] = tensor > 1
        found["world_size_1"] = tensor * (facts.pipeline_parallel or 1) == 1
    if facts.pipeline_parallel is not None:
        found["pipeline_parallel"] = facts.pipeline_parallel > 1
    caching = {pool.prefix_caching for pool in facts.pools}
    if caching and None not in caching:
        found["prefix_caching"] = True in caching
    config = _config(facts)
    if config:
        encodes = config.get("is_encoder_decoder") is True
        found["encoder_decoder"] = encodes
        found["recurrent_states"] = _RECURRENT.search(facts.model_config or "") is not None
        if not encodes and not takes_media(facts):
            found |= {"multimodal": False, "audio": False}
    return found


def _config(facts: Facts) -> Mapping[str, object]:
    try:
        config = json.loads(facts.model_config or "{}")
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, Mapping) else {}


def _matched(
    report: Report, finding: Finding, facts: Facts, signs: Sequence[str], per_request: float | None
) -> KnownReport | None:
    """The report as it matches this server, or `None` where something contradicts it."""
    affected = is_affected(report, facts.engine_version)
    if not {finding.id, finding.or_id} & set(report.verdicts) or affected is False:
        return None
    conditions = list(_conditions(report, finding, facts))
    if any(met is False for _, met in conditions):
        return None
    grows = _fits(report, per_request)
    if grows is False:
        return None
    met = [text for text, known in conditions if known]
    if grows and per_request is not None:
        met.append(f"it grows {format_bytes(per_request)} per request")
    if report.id in signs:
        met.append("its line is in the log")
    return KnownReport(
        id=report.id,
        summary=report.summary,
        remedy=report.remedy,
        links=report.links,
        certainty=report.certainty,
        affected=report.affected,
        fixed_in=report.fixed_in,
        version_affected=affected,
        met=tuple(met),
        unknown=tuple(text for text, known in conditions if known is None),
    )


def _conditions(report: Report, finding: Finding, facts: Facts) -> Iterator[tuple[str, bool | None]]:
    """Each condition of a report in words, with whether it is met; `None` where that is not known."""
    known, words = dict(known_conditions(facts)), vocabulary()["conditions"]
    if _OF_V1.search(finding.holder or ""):
        known["v0_engine"] = False
    if report.connectors:
        yield f"the KV connector is {' or '.join(report.connectors)}", _has_connector(report, facts)
    for name in report.conditions:
        yield words[name], known.get(name)
    # That a defect does not appear is no condition to ask for: it decides only where it is known.
    yield from ((words[name], False) for name in report.without if known.get(name))
    if report.processes and finding.id == "leak.host":
        names = vocabulary()["processes"]
        where = " or ".join(names[one][0] for one in report.processes)
        yield f"the memory of the {where} grows", _is_process(report, finding, facts)


def _has_connector(report: Report, facts: Facts) -> bool | None:
    own = facts.kv_connector
    if own is None:
        return None if facts.features is None else False
    if _SEVERAL.match(own):
        return None
    names = [_short(one) for one in report.connectors]
    if _OF_METRICS.fullmatch(own) and own not in names:
        return None if any(name.startswith(own) for name in names) else False
    return _short(own) in names


def _short(connector: str) -> str:
    """A connector's name without what all of them end in: `nixl` of NixlConnector, `lmcache` of LMCacheConnectorV1."""
    return re.sub(r"connector(?:v\d)?$", "", connector.lower())


def _is_process(report: Report, finding: Finding, facts: Facts) -> bool | None:
    names = vocabulary()["processes"]
    holder = finding.holder or ""
    own = {name for name, (_, pattern) in names.items() if re.search(pattern, holder, re.IGNORECASE)}
    if not own:
        return None
    if own & {"engine_core", "worker"} and (facts.tensor_parallel or 1) * (facts.pipeline_parallel or 1) == 1:
        own |= {"engine_core", "worker"}  # the only rank runs in the engine core
    return bool(own & set(report.processes))


def _bytes_per_request(finding: Finding, timeline: Timeline | None) -> float | None:
    """The growth for each request that finished; `None` where there were few, or their number is not reported."""
    if finding.growth is None or timeline is None:
        return None
    counts = [
        (sample.at_seconds, count)
        for sample in timeline.samples
        if (count := sample.total("requests_finished_total")) is not None
    ]
    if len(counts) < 2 or counts[-1][1] - counts[0][1] < MIN_REQUESTS:  # noqa: PLR2004 - a first and a last
        return None
    seconds = counts[-1][0] - counts[0][0]
    return finding.growth.bytes_per_second * seconds / (counts[-1][1] - counts[0][1])


def _fits(report: Report, per_request: float | None) -> bool | None:
    """Whether the growth is the reported one; less proves nothing, since not each request may cause it."""
    if not report.bytes_per_request or per_request is None:
        return None
    least, most = report.bytes_per_request
    if per_request > LARGER_FACTOR * most:
        return False
    return True if least / 2 <= per_request <= 2 * most else None


def _rank(one: KnownReport) -> tuple[bool, bool, int, int, bool, bool, str]:
    return (
        not one.certain,
        one.version_affected is None,
        -len(one.met),
        len(one.unknown),
        one.certainty != "confirmed",
        one.fixed_in is None,
        one.id,
    )


def _first_line(reports: Sequence[KnownReport], facts: Facts) -> str:
    """How many reports match which server, where they are, and the release with the fixes."""
    certain = [one for one in reports if one.certain]
    shown = certain or list(reports)
    server = f"{engine_title(facts.engine_name or '')} {facts.engine_version or ''}".rstrip()
    if facts.kv_connector is not None:
        server = f"{server} with {facts.kv_connector}"
    if order(facts.engine_version) is None:
        may = f"{plural(len(shown), 'known report')} may match: the version of {server} decides, and is not reported; "
        place = typed(facts.engine_name, "version")
        asked = "" if place is None else f"`{place}`, "
        return f"{may}{asked}the startup log or the image's tag in the metric kube_pod_container_info shows it"
    links = ", ".join(one.links[0] for one in shown[:MAX_LINKS])
    more = "" if len(shown) <= MAX_LINKS else f" and {len(shown) - MAX_LINKS} more"
    line = f"{'matches' if certain else 'may match'} {plural(len(shown), 'known report')} for {server}: {links}{more}"
    fixes = [one.fixed_in for one in shown if one.fixed_in is not None]
    if fixes:
        newest = max(fixes, key=lambda one: order(one) or _NO_VERSION)
        line += (
            f"; fixed in {newest}: upgrade" if len(fixes) == len(shown) else f"; {newest} fixes {len(fixes)} of them"
        )
    if certain and len(reports) > len(certain):
        line += f"; {plural(len(reports) - len(certain), 'further report')} may match"
    return line
