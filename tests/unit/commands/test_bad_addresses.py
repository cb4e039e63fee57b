"""Addresses, keys and certificates that lead nowhere: one clear line on stderr with what to look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.certificates import Certificate, make_certificate
from tests.fixtures.hostile import Hostile, refused_port, reply
from tests.integration.vllm.cli import kvdiag
from tests.unit.commands.refusals import SERVER, refusal, without_details


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://127.0.0.1",
        "http://",
        "http://[::1",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://a/\x01",
        "//",
    ],
)
def test_what_is_no_address_is_told(url: str) -> None:
    """A URL that leads nowhere is quoted, with one that would do."""
    # WHEN
    actual = refusal("run", "--url", url)

    # THEN
    assert f"{url!r} is not the address of a server: give one such as http://127.0.0.1:8000" == actual


@pytest.mark.parametrize("command", ["run", "audit"])
def test_server_that_is_not_there_is_told(command: str) -> None:
    """A port that nobody serves is a question whether the server is up."""
    # WHEN
    with refused_port() as port:
        actual = refusal(command, "--url", f"http://127.0.0.1:{port}")

    # THEN
    expected = f"http://127.0.0.1:{port}: cannot connect (…): is the server up, and the URL right?"
    assert expected == without_details(actual)


def test_unknown_host_is_told() -> None:
    """A host name that does not exist is a question whether the URL is right."""
    # WHEN
    actual = refusal("run", "--url", "kvdiag.invalid:8000")

    # THEN
    expected = "http://kvdiag.invalid:8000: cannot connect (…): is the server up, and the URL right?"
    assert expected == without_details(actual)


def test_password_in_the_address_is_not_shown() -> None:
    """Credentials of a URL are neither printed nor passed on."""
    # WHEN
    with refused_port() as port:
        actual = refusal("run", "--url", f"http://me:secret@127.0.0.1:{port}")

    # THEN
    expected = f"http://127.0.0.1:{port}: cannot connect (…): is the server up, and the URL right?"
    assert expected == without_details(actual)


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines", "bell\x07"])
def test_key_that_no_header_takes_is_told(key: str) -> None:
    """An API key that cannot be sent is refused without being shown."""
    # WHEN
    actual = refusal("run", "--url", "http://127.0.0.1:1", env={"KVDIAG_API_KEY": key})

    # THEN
    assert "the API key has characters that no server takes: is it the right one?" == actual


def test_key_that_is_refused_is_told() -> None:
    """Who has given a key is not asked to give one."""
    # WHEN
    with Hostile({"/v1/models": reply("", status=401)}) as server:
        actual = refusal("run", "--url", server.url, env={"KVDIAG_API_KEY": "wrong"})

    # THEN
    assert f"{server.url}: 401 on /v1/models: the server refuses the key that was given" == actual


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate that nobody trusts."""
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def test_untrusted_certificate_is_told(certificate: Certificate) -> None:
    """TLS with an unknown authority names the option that makes it known."""
    # WHEN
    with Hostile(SERVER, tls=certificate.server_context) as server:
        actual = refusal("run", "--url", server.url)

    # THEN
    expected = "TLS: the server's certificate is not trusted: pass its authority with --ca-file"
    assert f"{server.url}: {expected}" == actual


@pytest.mark.parametrize("insecure", [True, False], ids=["--insecure", "--ca-file"])
def test_certificate_can_be_trusted(certificate: Certificate, insecure: bool) -> None:
    """With its authority, or unchecked, the same server is looked at."""
    # GIVEN
    option = ["--insecure"] if insecure else ["--ca-file", str(certificate.certificate)]

    # WHEN
    with Hostile(SERVER, tls=certificate.server_context) as server:
        actual = kvdiag("run", "--url", server.url, "--dry-run", *option)

    # THEN
    assert (0, "") == (actual.code, actual.stderr)


def test_https_to_a_plain_port_is_told() -> None:
    """TLS spoken to a server that has none asks whether it has."""
    # WHEN
    with Hostile(SERVER) as server:
        url = server.url.replace("http", "https")
        actual = refusal("run", "--url", url)

    # THEN
    assert f"{url}: TLS failed (…): is it https at all?" == without_details(actual)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file or directory"), (b"no certificate", "[X509")],
    ids=["missing", "no certificate"],
)
def test_bad_authority_is_told(tmp_path: Path, content: bytes | None, problem: str) -> None:
    """A file of authorities that cannot be used is named."""
    # GIVEN
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)

    # WHEN
    actual = refusal("run", "--url", "https://127.0.0.1:1", "--ca-file", str(path))

    # THEN
    expected = f"cannot use {path} as --ca-file: {problem}"
    assert expected == actual[: len(expected)]
