"""`kvdiag alerts`: the shipped rules for Prometheus, with links to where they are read."""

import sys

import click

from kvdiag.alert_files import BASE, rules, with_links


def _address(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not BASE.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not an address; give http://HOST/PATH")
    return value


@click.command()
@click.option("--runbook-base", metavar="URL", callback=_address, help="Runbooks' address; default: the daemon's.")
@click.option("--dashboard-base", metavar="URL", callback=_address, help="Grafana URL; default: kvdiag's status page.")
@click.option("--operator", is_flag=True, help="Print a PrometheusRule for the Prometheus operator.")
def command(runbook_base: str | None, dashboard_base: str | None, *, operator: bool) -> None:
    """Print the recording and alerting rules as a rule file for Prometheus."""
    sys.stdout.write(with_links(rules(operator=operator), runbook_base, dashboard_base))
