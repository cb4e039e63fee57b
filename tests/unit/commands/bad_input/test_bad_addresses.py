"""Addresses, keys and certificates that lead nowhere: one clear line on stderr with what to look at."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.certificates import Certificate, make_certificate
from tests.fixtures.hostile import Hostile, refused_port, reply
from tests.unit.commands.bad_input.refusals import SERVER, call, listed, refusal, without_details

NO_ADDRESSES = ("", "ftp://127.0.0.1", "http://", "http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:0", "//")


def test_addresses_and_keys_that_lead_nowhere(golden: Callable[[str, str], None]) -> None:
    """Each is one line that quotes the address, without a password in it, and says what to look at."""
    told = {f"address {url!r}": refusal("run", "--url", url) for url in (*NO_ADDRESSES, "http://a/\x01")}
    with refused_port() as port:
        for command in ("run", "audit"):
            text = refusal(command, "--url", f"http://127.0.0.1:{port}")
            told[f"{command}: nobody listens"] = text.replace(str(port), "PORT")
    told["unknown host"] = refusal("run", "--url", "kvdiag.invalid:8000")
    for key in ("schlüssel", "two\nlines", "bell\x07"):
        told[f"key {key!r}"] = refusal("run", "--url", "http://127.0.0.1:1", env={"KVDIAG_API_KEY": key})
    with Hostile({"/v1/models": reply("", status=401)}) as server:
        text = refusal("run", "--url", server.url, env={"KVDIAG_API_KEY": "wrong"})
        told["key is refused"] = text.replace(server.url, "URL")
    assert not [text for text in told.values() if "schl" in text]
    golden("errors/addresses.txt", listed({name: without_details(text) for name, text in told.items()}))


def test_password_in_the_address_is_not_shown() -> None:
    """Credentials of a URL are neither printed nor passed on."""
    with refused_port() as port:
        actual = refusal("run", "--url", f"http://me:secret@127.0.0.1:{port}")
    assert actual.startswith(f"http://127.0.0.1:{port}: cannot connect")
    assert "secret" not in actual


@pytest.mark.parametrize("url", ["http:/me:secret@127.0.0.1:1", "http://me:1/secret@127.0.0.1:1"])
def test_password_in_a_mistyped_address_is_not_shown(url: str) -> None:
    """It stood in the path, and so in errors, logs, reports and traces."""
    assert "secret" not in refusal("run", "--url", url)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate from an authority that no client trusts."""
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.mark.parametrize("insecure", [True, False], ids=["--insecure", "--ca-file"])
def test_certificate_can_be_trusted(certificate: Certificate, insecure: bool) -> None:
    """With its authority, or unchecked, the same server is looked at."""
    option = ["--insecure"] if insecure else ["--ca-file", str(certificate.certificate)]

    with Hostile(SERVER, tls=certificate.server_context) as server:
        actual = call("run", "--url", server.url, "--dry-run", *option)

    assert (0, "") == (actual.code, actual.stderr)


def test_tls_that_fails(certificate: Certificate, tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """An unknown authority names the option that makes it known; so does a file of authorities that cannot be used."""
    (tmp_path / "bad.pem").write_bytes(b"no certificate")
    told = {}
    with Hostile(SERVER, tls=certificate.server_context) as server:
        told["untrusted"] = refusal("run", "--url", server.url).replace(server.url, "URL")
        url = server.url.replace("127.0.0.1", "localhost")
        authority = str(certificate.certificate)
        told["another host"] = refusal("run", "--url", url, "--ca-file", authority).replace(url, "URL")
    with Hostile(SERVER) as server:
        url = server.url.replace("http", "https")
        told["not https"] = refusal("run", "--url", url).replace(url, "URL")
    for name in ("missing.pem", "bad.pem"):
        text = refusal("run", "--url", "https://127.0.0.1:1", "--ca-file", str(tmp_path / name))
        told[name] = text.replace(str(tmp_path), "FOLDER").partition("[X509")[0].strip()
    golden("errors/tls.txt", listed({name: without_details(text) for name, text in told.items()}))
