"""A real Prometheus behind TLS, a password, client certificates and a path prefix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fixtures.certificates import Certificate, make_certificate
from tests.integration.prometheus.conftest import Judged, require_prometheus
from tests.integration.prometheus.histories import kv_leak
from tests.integration.prometheus.server import serving, write_history

Diagnose = Callable[..., Judged]

SECRET = "secret"  # noqa: S105 - of a server that lives for one test
BCRYPT = "$2b$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW"
"""What bcrypt makes of it, with the fewest rounds there are."""

PREFIX = "/api/prom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """The server, and what opens it."""

    url: str
    certificate: Certificate
    password_file: Path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server that wants a client certificate of its own authority, and a name and a password."""
    require_prometheus()
    folder = tmp_path_factory.mktemp("guarded")
    certificate = make_certificate(folder)
    (folder / "password").write_text(f"{SECRET}\n")
    (folder / "web.yml").write_text(
        f"tls_server_config:\n  cert_file: {certificate.certificate}\n  key_file: {certificate.key}\n"
        f"  client_ca_file: {certificate.certificate}\n  client_auth_type: RequireAndVerifyClientCert\n"
        f"basic_auth_users:\n  grafana: {BCRYPT}\n"
    )
    write_history(kv_leak(), folder / "data")
    options = [f"--web.config.file={folder / 'web.yml'}", f"--web.route-prefix={PREFIX}"]
    with serving(folder / "data", *options) as url:
        yield Guarded(
            url=f"{url.replace('http://', 'https://')}{PREFIX}",
            certificate=certificate,
            password_file=folder / "password",
        )


def test_every_door_can_be_opened(guarded: Guarded, diagnose: Diagnose) -> None:
    """Authority, client certificate, name and password, path prefix: the history is read."""
    own = guarded.certificate
    keys = ["--ca-file", str(own.certificate), "--cert-file", str(own.certificate), "--key-file", str(own.key)]
    said = diagnose(
        "--prometheus", guarded.url, *keys, "--user", "grafana", "--password-file", str(guarded.password_file)
    )
    assert said.stdout.startswith("FAULT  1 replica: 1 fault"), said.stderr
    assert SECRET not in said.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param([], "--ca-file", id="no authority"),
        pytest.param(["--insecure"], "--cert-file", id="no certificate"),
        pytest.param(["--insecure", "--cert-file"], "--token-file", id="no password"),
    ],
)
def test_a_closed_door_is_one_clear_line(guarded: Guarded, diagnose: Diagnose, options: list[str], reason: str) -> None:
    """Which door it is, and what opens it."""
    own = guarded.certificate
    keys = [str(own.certificate), "--key-file", str(own.key)] if "--cert-file" in options else []
    said = diagnose("--prometheus", guarded.url, *options, *keys)
    assert (3, "", 1) == (said.code, said.stdout, said.stderr.count("\n"))
    assert reason in said.stderr
