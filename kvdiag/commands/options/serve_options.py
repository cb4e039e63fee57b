"""The options of `kvdiag serve`: one field each, with its click option and whether changing it needs a restart.

A new option is one field here. Values come from flags, the environment and the [serve] table of a TOML file, in this
order; SIGHUP reads them again (`reread`).
"""

# ruff: noqa: RUF009 - `given_by` makes fields, not values

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import click
from click.core import ParameterSource

from kvdiag.commands import settings
from kvdiag.commands.options.addresses import basic_authorization, pasted, without_user
from kvdiag.commands.options.common import (
    Duration,
    ServerAccess,
    Size,
    Within,
    agent_option,
    collected,
    flag_of,
    given_by,
    request_ids_option,
    server_access,
)
from kvdiag.commands.options.fleet_options import PrometheusFields, prometheus_fields
from kvdiag.commands.options.thresholds import limits_of, reserved_gap_option
from kvdiag.diagnosis.limits import DEFAULT_LIMITS, Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.segment_store import MAX_BYTES, MIN_MAX_BYTES

LISTEN = "127.0.0.1:9743"
_RATIO = Within(0.0, 1.0)


def _configured(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:  # noqa: ARG001 - click's signature
    """Take the defaults of the other options from a file, before they are looked at."""
    if path is not None:
        context.default_map = settings(context, path).get("serve", {})
    return path


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of one daemon.

    Raises:
        KvdiagError: an address or a threshold is invalid.
    """

    listen: str = given_by(
        "Address to serve on; all who can reach it can read it.",
        metavar="HOST:PORT",
        default=LISTEN,
        restart=True,
    )
    url: str | None = given_by("Server to watch; default: search this host's usual ports.")
    access: ServerAccess = given_by(server_access)
    agent_dir: Path | None = given_by(agent_option)
    history: PrometheusFields = given_by(prometheus_fields)
    every: float | None = given_by("Time between rounds of --prometheus; default: 5m.", type=Duration(30.0, 3600.0))
    show_request_ids: bool = given_by(request_ids_option, default=False, restart=True)
    allow_profile: bool = given_by(
        "Take profiles on POST /api/v1/profile from this machine.",
        is_flag=True,
        default=False,
        restart=True,
    )
    record_dir: Path | None = given_by("Directory for recordings; restored at the next start.", restart=True)
    record_max_size: int = given_by(
        "Size limit of --record-dir; the oldest data is deleted.",
        type=Size(MIN_MAX_BYTES),
        default=f"{MAX_BYTES >> 20}MiB",
    )
    web_config: Path | None = given_by("TLS and passwords (Prometheus' format); needs kvdiag[web].", restart=True)
    otlp_endpoint: str | None = given_by(
        "Push metrics to an OTLP collector; needs kvdiag[otlp].", metavar="URL", restart=True
    )
    config: Path | None = given_by(
        "TOML file with a table [serve]; reread on SIGHUP.",
        is_eager=True,
        callback=_configured,
    )
    tick_seconds: float | None = given_by("Sampling interval.", type=Within(0.05, 1.0), hidden=True, restart=True)
    reserved_gap_bytes: int = given_by(reserved_gap_option)
    pressure_warning: float = given_by(
        "Memory pressure (0 to 1) that warns.", type=_RATIO, default=DEFAULT_LIMITS.pressure.warning_ratio
    )
    pressure_critical: float = given_by(
        "Memory pressure (0 to 1) that pages on-call.", type=_RATIO, default=DEFAULT_LIMITS.pressure.critical_ratio
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be used at once, and not at first use."""
        _ = self.address, self.limits, self.otlp
        own = {"--url": self.url, "--agent-dir": self.agent_dir}
        own |= {"--metrics-url": self.access.metrics_url, "--api-key": self.access.api_key}
        given = [name for name, value in own.items() if value is not None]
        if self.allow_profile and self.agent_dir is None:
            raise click.UsageError("--allow-profile needs --agent-dir, where the server's agents publish")
        if self.history.prometheus is None and (needless := self._only_of_fleets()):
            raise click.UsageError(f"{needless} needs --prometheus")
        if self.history.prometheus is not None and given:
            raise click.UsageError(f"give either --prometheus, to watch a fleet, or {given[0]}, to watch one server")

    def _only_of_fleets(self) -> str | None:
        """An option that is given, and that only a fleet's daemon has; `None` if there is none."""
        given = [one for one in fields(PrometheusFields) if getattr(self.history, one.name) != one.default]
        given += [one for one in fields(self) if one.name == "every" and self.every is not None]
        return flag_of(given[0]) if given else None

    @cached_property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on."""
        return address(self.listen)

    @cached_property
    def limits(self) -> Limits:
        """The thresholds of the diagnosis."""
        return limits_of(self.reserved_gap_bytes, pressure=(self.pressure_warning, self.pressure_critical))

    @cached_property
    def otlp(self) -> tuple[str, str | None] | None:
        """The collector's address for metrics, and the authorization that the given address has; `None` without one."""
        if self.otlp_endpoint is None:
            return None
        refusal = "--otlp-endpoint is not an address: give one such as http://collector:4318"
        parts = pasted(self.otlp_endpoint, ("/v1/metrics",), refusal)
        if "?" in self.otlp_endpoint:
            raise KvdiagError(f"{refusal}, without a query (?): headers go into OTEL_EXPORTER_OTLP_HEADERS")
        url = urlunsplit(without_user(parts)._replace(path=f"{parts.path.rstrip('/')}/v1/metrics"))
        return url, basic_authorization(parts, None, None, None)

    @property
    def fixed(self) -> Mapping[str, Any]:
        """The options that only a restart changes."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.metadata.get("restart")}


serve_options = collected(ServeOptions, "options")


def reread(context: click.Context) -> ServeOptions:
    """Return the options as of now: flags stay, the others are read from the environment and the file again.

    Raises:
        KvdiagError: the file cannot be used.
    """
    given = context.params["config"] or context.find_root().params.get("config")
    defaults = {} if given is None else settings(context, given).get("serve", {})
    try:
        fresh = context.command.make_context(context.info_name, [], parent=context.parent, default_map=defaults)
    except click.UsageError as error:
        raise KvdiagError(error.format_message()) from error
    by_flag = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    values = {**fresh.params, **by_flag}
    access = ServerAccess(**{one.name: values.pop(one.name) for one in fields(ServerAccess)})
    history = PrometheusFields(**{one.name: values.pop(one.name) for one in fields(PrometheusFields)})
    return ServeOptions(access=access, history=history, **values)


def address(listen: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT.

    Raises:
        KvdiagError: it is neither.
    """
    refusal = KvdiagError(f"{listen!r} is not an address to listen on: give HOST:PORT, such as {LISTEN}")
    try:
        parts = urlsplit(f"//{listen}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise refusal from error
    if not host or port is None or parts.netloc != listen or "@" in listen:
        raise refusal
    return host, port
