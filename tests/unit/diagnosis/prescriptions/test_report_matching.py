"""Which reports a server and its finding match: those of its own incident, and none that anything contradicts."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.prescriptions import with_known_reports
from kvdiag.diagnosis.prescriptions.known_reports import Report, every_report
from kvdiag.diagnosis.prescriptions.report_matching import is_affected
from kvdiag.model import Engine, Facts, Finding, GrowthFigures, KnownReport, Sample, Status, Timeline
from tests.unit.diagnosis.prescriptions.reported import ReportedServer, servers

SERVERS = servers()
BY_ID = {one.id: one for one in every_report()}
HOST = Finding("leak.host", "fault", "grows", holder="VLLM::EngineCore 12")
BLOCKS = Finding("leak.kv_blocks", "fault", "blocks are still in use")


def matched(finding: Finding, facts: Facts, timeline: Timeline | None = None) -> dict[str, KnownReport]:
    """The reports that match, by id."""
    prescription = with_known_reports(finding, facts, timeline).prescription
    return {} if prescription is None else {one.id: one for one in prescription.known_reports}


def vllm(version: str | None, connector: str | None = None, **known: object) -> Facts:
    """A vLLM server."""
    return replace(Facts(engine_name="vllm", engine_version=version, kv_connector=connector), **known)  # type: ignore[arg-type]


@pytest.mark.parametrize("server", SERVERS, ids=lambda one: one.incident)
def test_a_reported_server_matches_its_own_report(server: ReportedServer) -> None:
    """A reported server matches its own report."""
    assert {one.id for one in server.own} & {one.id for one in server.matched()}


@pytest.mark.parametrize("server", SERVERS, ids=lambda one: one.incident)
def test_nothing_that_matches_contradicts_engine_version_verdict_or_connector(server: ReportedServer) -> None:
    """Nothing that matches contradicts engine version verdict or connector."""
    facts = server.facts
    for found in server.matched():
        report = BY_ID[found.id]
        assert facts.engine_name in report.engines
        assert server.verdict in report.verdicts
        assert is_affected(report, facts.engine_version) is not False
        assert not report.connectors or facts.kv_connector is None or facts.kv_connector in report.connectors


@pytest.mark.parametrize("status", ["ok", "unknown"])
@pytest.mark.parametrize("server", SERVERS[:3], ids=lambda one: one.incident)
def test_what_is_no_problem_has_no_report(server: ReportedServer, status: Status) -> None:
    """What is no problem has no report."""
    finding = server.finding(status)
    assert with_known_reports(finding, server.facts) is finding


@pytest.mark.parametrize("report", [one for one in BY_ID.values() if one.fixed_in], ids=lambda one: one.id)
@pytest.mark.parametrize("later", ["", "+cu128"])
def test_the_release_with_the_fix_never_matches(report: Report, later: str) -> None:
    """The release with the fix never matches."""
    for engine in report.engines:
        facts = Facts(engine_name=engine, engine_version=f"{report.fixed_in}{later}")
        for verdict in report.verdicts:
            assert report.id not in matched(Finding(verdict, "fault", ""), facts)


def test_an_engine_that_is_not_known_matches_nothing() -> None:
    """An engine that is not known matches nothing."""
    assert not matched(HOST, Facts(engine_version="0.22.0"))


def test_an_unknown_version_is_possible_and_its_source_named() -> None:
    """An unknown version is possible and its source named."""
    finding = with_known_reports(HOST, vllm(None))
    assert finding.prescription is not None
    assert {one.version_affected for one in finding.prescription.known_reports} == {None}
    assert "GET /version" in (finding.prescription.known_issue or "")
    other = with_known_reports(BLOCKS, Facts(engine_name="sglang"))
    assert other.prescription is not None
    assert "GET /server_info" in (other.prescription.known_issue or "")


def test_a_version_after_the_last_reported_one_is_possible() -> None:
    """A version after the last reported one is possible."""
    found = matched(BLOCKS, vllm("0.34.0", "NixlPushConnector"))
    assert found["vllm#46283"].version_affected is None


@pytest.mark.parametrize(("version", "listed"), [("0.38.0", True), ("0.39.0", False), ("1.0.0", False)])
def test_many_releases_after_the_last_reported_one_a_defect_is_taken_for_mended(version: str, listed: bool) -> None:
    """Many releases after the last reported one a defect is taken for mended."""
    assert ("vllm#46283" in matched(BLOCKS, vllm(version, "NixlPushConnector"))) == listed


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (vllm("0.12.0", "NixlConnector"), True),
        (vllm("0.12.0"), None),
        (vllm("0.12.0", "nixl"), True),  # as its metrics name it
        (vllm("0.12.0", "MultiConnector"), None),
        (vllm("0.12.0", "MooncakeConnector"), False),
        (vllm("0.12.0", features=()), False),
    ],
)
def test_a_connector_confirms_is_asked_for_or_excludes(facts: Facts, expected: bool | None) -> None:
    """A connector confirms is asked for or excludes."""
    found = matched(HOST, facts).get("vllm#24264")
    assert (False if found is None else found.certain or None) == expected


@pytest.mark.parametrize(
    ("config", "listed"), [('{"model_type": "qwen3"}', False), ('{"vision_config": {}}', True), (None, True)]
)
def test_a_model_of_text_alone_excludes_reports_of_images(config: str | None, listed: bool) -> None:
    """A model of text alone excludes reports of images."""
    assert ("vllm#34183" in matched(HOST, vllm("0.12.0", model_config=config))) == listed


def test_a_model_with_recurrent_layers_excludes_what_it_does_not_have() -> None:
    """A model with recurrent layers excludes what it does not have."""
    hybrid = vllm("0.22.0", model_config='{"layer_types": ["linear_attention", "full_attention"]}')
    assert "vllm#44490" in matched(HOST, vllm("0.22.0"))
    assert "vllm#44490" not in matched(HOST, hybrid)


def test_growth_of_another_process_excludes() -> None:
    """Growth of another process excludes."""
    server = replace(HOST, holder="APIServer 7")
    assert "vllm#44490" not in matched(server, vllm("0.22.0"))


@pytest.mark.parametrize(("each", "expected"), [(400.0, "met"), (20.0, "possible"), (5e6, "excluded")])
def test_growth_per_request_is_compared(each: float, expected: str) -> None:
    """Growth per request is compared."""
    engines = [(Engine(engine="0", requests_finished_total=count),) for count in (0, 1000)]
    timeline = Timeline(samples=tuple(Sample(at_seconds=1e3 * at, engines=one) for at, one in enumerate(engines)))
    growing = replace(HOST, growth=GrowthFigures(bytes_per_second=each))
    found = matched(growing, vllm("0.22.0"), timeline).get("vllm#44490")
    said = "excluded" if found is None else "met" if any("per request" in one for one in found.met) else "possible"
    assert said == expected


def test_a_line_in_the_log_puts_its_report_first() -> None:
    """A line in the log puts its report first."""
    facts = Facts(engine_name="sglang", engine_version="0.5.9")
    finding = with_known_reports(BLOCKS, facts, signs=("sglang#20010",))
    assert finding.prescription is not None
    assert finding.prescription.known_reports[0].id == "sglang#20010"


def test_the_first_line_names_server_link_and_fix() -> None:
    """The first line names server link and fix."""
    finding = with_known_reports(replace(BLOCKS, id="leak.host"), vllm("0.9.2", "NixlConnector"))
    assert finding.prescription is not None
    line = finding.prescription.known_issue or ""
    assert [part in line for part in ("vLLM 0.9.2 with NixlConnector", "/issues/24264", "0.16.0: upgrade")] == [
        True
    ] * 3


def test_a_report_of_many_patches_ago_does_not_match() -> None:
    """SGLang releases patches of one minor release: those of a year are as far as another engine's minor ones."""
    old = BY_ID["sglang#10408"]
    assert (None, None) == (old.fixed_in, is_affected(old, "0.5.4"))
    assert is_affected(old, "0.5.23") is False
