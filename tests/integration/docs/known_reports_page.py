"""Write docs/known-reports.md from the data of known reports: python -m tests.integration.docs.known_reports_page."""

from collections.abc import Iterator
from pathlib import Path

from kvdiag.diagnosis.prescriptions.known_reports import Report, every_report, reports_of, vocabulary
from kvdiag.engine_data import engine_data
from kvdiag.engine_memory import engine_title

PAGE = Path(__file__).parents[3] / "docs" / "known-reports.md"
BEGIN = "<!-- written by python -m tests.integration.docs.known_reports_page -->"


def page() -> str:
    """The page as it has to be: its introduction as it is, then a table for each engine."""
    introduction = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    return f"{introduction}{BEGIN}\n{''.join(_tables())}"


def _tables() -> Iterator[str]:
    names = sorted(engine_data("known_reports.json"), key=engine_title)
    for name in names:
        own = [one for one in reports_of(name) if one.engines == (name,)]
        yield from _table(engine_title(name), own)
    yield from _table("Libraries", [one for one in every_report() if len(one.engines) > 1])


def _table(title: str, reports: list[Report]) -> Iterator[str]:
    yield f"\n## {title}\n\n| report | verdict | versions | defect | remedy |\n|---|---|---|---|---|\n"
    for one in sorted(reports, key=lambda report: (report.verdicts, report.id)):
        only = _only(one)
        links = ", ".join(f"[{_name(one, place, link)}]({link})" for place, link in enumerate(one.links))
        verdicts = ", ".join(f"`{verdict}`" for verdict in one.verdicts)
        cause = "" if one.certainty == "confirmed" else " Cause not confirmed."
        yield f"| {links} | {verdicts} | {one.affected} | {one.summary}{only}{cause} | {one.remedy} |\n"


def _name(report: Report, place: int, link: str) -> str:
    return link.rpartition("/")[2] if place else report.id


def _only(report: Report) -> str:
    words = vocabulary()["conditions"]
    conditions = [words[name] for name in report.conditions]
    if report.connectors:
        conditions.insert(0, f"the KV connector is {' or '.join(report.connectors)}")
    return f" Only if {' and '.join(conditions)}." if conditions else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
