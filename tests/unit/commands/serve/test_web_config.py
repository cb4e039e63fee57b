"""A web configuration as Prometheus' exporters have it: what is taken, what is refused by name, and who gets in."""

import asyncio
import base64
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.server.connections import WebServer
from kvdiag.server.endpoints import Pages
from kvdiag.server.passwords import Passwords, needed
from kvdiag.server.web_config import REFUSED, access, read_web_config
from tests.fixtures.certificates import Certificate, make_certificate
from tests.unit.outputs.test_metrics import snapshot

HASH = "$2b$04$V5qiguvrW4p6/U9Lax4ZcOhXENeqzj8JH/1pNuTJaNt/eGvp1IRTq"  # of "secret"
APACHES = HASH.replace("$2b$", "$2y$")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the configuration is."""
    return tmp_path / "web.yml"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A server's."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


def basic(user: str, password: str) -> str:
    """The header of a user."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


PAIR = "cert_file: a, key_file: b"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[1", "YAML"),
        ("- 1", "mapping"),
        ("a: &x [1]\nb: *x", "YAML aliases"),
        ("basic_auth_users: {a: b}\nbasic_auth_users: {}", "twice (line 2)"),
        ("tls_server_config: {cert_file: a, cert_file: b}", "twice (line 1)"),
        ("!!python/object/apply:os.system ['true']", "YAML"),
        ("tls: {}", "unknown key 'tls'"),
        ("tls_server_config: {certfile: a}", "unknown key 'certfile'"),
        ("tls_server_config: {cert_file: a}", "no key_file"),
        ("tls_server_config: {cert_file: 1, key_file: b}", "cert_file must be"),
        (f"tls_server_config: {{{PAIR}, min_version: TLS10}}", "'TLS10'"),
        (f"tls_server_config: {{{PAIR}, min_version: TLS13, max_version: TLS12}}", "max_version TLS12"),
        (f"tls_server_config: {{{PAIR}, client_auth_type: RequireAnyClientCert}}", "'RequireAnyClientCert'"),
        (f"tls_server_config: {{{PAIR}, client_auth_type: RequireAndVerifyClientCert}}", "client_ca_file"),
        (f"tls_server_config: {{{PAIR}, prefer_server_cipher_suites: 1}}", "prefer_server_cipher_suites"),
        ("http_server_config: {http2: true}", "http2: false"),
        ("http_server_config: {headers: {Server: x}}", "'Server'"),
        ("http_server_config: {headers: {X-Frame-Options: x}}", "deny or sameorigin"),
        ('http_server_config: {headers: {X-XSS-Protection: "a\\r\\nb"}}', "X-XSS-Protection"),
        ("basic_auth_users: {alice: secret}", "htpasswd -nBC 10 alice"),
        (f"basic_auth_users: {{alice: {HASH.replace('$04$', '$20$')}}}", "cost 20"),
        *((f"tls_server_config: {{{key}: x}}", f"{key} of tls_server_config") for key in REFUSED),
        ("rate_limit: {burst: 1}", "rate_limit"),
    ],
)
def test_a_setting_that_is_not_supported_is_refused_by_name(path: Path, text: str, named: str) -> None:
    """No setting is ignored silently."""
    path.write_text(text)

    with pytest.raises(KvdiagError) as refusal:
        read_web_config(path)

    assert named in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_missing_module_names_the_extra() -> None:
    """Without its optional dependency, --web-config is an error that names the extra to install."""
    with pytest.raises(KvdiagError, match=r"^--web-config .*'kvdiag\[web\]'$"):
        needed("kvdiag_never_was", "--web-config")


@pytest.mark.parametrize("missing", ["certificate.pem", "key.pem"])
def test_certificates_that_cannot_be_used_are_an_error(path: Path, certificate: Certificate, missing: str) -> None:
    """Relative paths resolve from the configuration's folder; a missing file and an invalid pair are errors."""
    path.write_text("tls_server_config: {cert_file: certificate.pem, key_file: key.pem}")
    for file in (certificate.certificate, certificate.key):
        (path.parent / file.name).write_bytes(file.read_bytes() if file.name != missing else b"nonsense")
    with pytest.raises(KvdiagError, match="not a usable certificate"):
        read_web_config(path).tls()
    (path.parent / missing).unlink()
    with pytest.raises(KvdiagError, match=f"cannot read .*{missing}: no such file"):
        read_web_config(path).tls()


def asked(passwords: Passwords, *headers: str) -> list[bool | None]:
    """What becomes of requests, one after the other."""

    async def work() -> list[bool | None]:
        return [await passwords.allow(header, f"127.0.0.{number}") for number, header in enumerate(headers)]

    return asyncio.run(work())


@pytest.fixture
def passwords() -> Iterator[Passwords]:
    """Two users, one with a hash as Apache and Go write it."""
    made = Passwords({"alice": HASH, "bob": APACHES})
    yield made
    made.close()


def test_users_get_in_and_others_do_not(passwords: Passwords) -> None:
    """With user and password together, however often; with anything else not."""
    right = [basic("alice", "secret"), basic("bob", "secret"), basic("alice", "secret")]
    wrong = [
        *(
            "",
            "Basic",
            "Basic !",
            "Bearer secret",
            basic("alice", ""),
            basic("alice", "Secret"),
            basic("eve", "secret"),
        ),
        *("Basic " + base64.b64encode(b"alice").decode(), basic("", ""), basic("alice", "secret" + "x" * 100)),
        *("Basic " + base64.b64encode(b"\xff:\xff").decode(), basic("alice", "secret\0x")),
    ]
    assert [True] * len(right) == asked(passwords, *right)
    assert [False] * len(wrong) == asked(passwords, *wrong)


def test_guesses_are_forgotten_and_no_user_is(passwords: Passwords) -> None:
    """What is remembered is bounded; thousands of guesses drive no right one out, and cost it no second hashing."""
    found = asked(passwords, basic("alice", "secret"), *(basic("alice", str(guess)) for guess in range(150)))
    known = passwords._known  # noqa: SLF001 - no client can see it
    assert ([True, *[False] * 150], 100, True) == (found, len(known), True in known.values())


def test_tls_and_passwords_guard_every_page(path: Path, certificate: Certificate) -> None:
    """As for any exporter: over TLS alone, no page without a password, with the headers that were asked for."""
    path.write_text(
        f"tls_server_config: {{cert_file: {certificate.certificate}, key_file: {certificate.key}}}\n"
        "http_server_config: {headers: {X-Frame-Options: deny}}\n"
        f"basic_auth_users: {{alice: {APACHES}}}\n"
    )
    config = read_web_config(path)

    async def statuses() -> tuple[list[bytes], bytes]:
        web = WebServer(Pages(newest=snapshot, history=tuple))
        web.access, passwords = access(config)
        port = await web.start("127.0.0.1", 0, config.tls())
        trust = ssl.create_default_context(cafile=certificate.certificate)

        async def ask(target: str, header: str, tls: ssl.SSLContext | None = trust) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            try:
                writer.write(
                    f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {header}\r\n"
                    "Connection: close\r\n\r\n".encode()
                )
                return await asyncio.wait_for(reader.read(), 20)
            except OSError:
                return b""
            finally:
                writer.close()

        try:
            refused = [await ask(target, basic("alice", "wrong")) for target in ("/metrics", "/-/healthy", "/nothing")]
            allowed = await ask("/metrics", basic("alice", "secret"))
            return [*refused, await ask("/metrics", basic("alice", "secret"), None)], allowed
        finally:
            await web.stop()
            passwords.close()

    refused, allowed = asyncio.run(statuses())
    assert [b"HTTP/1.1 401 Unauthorized"] * 3 + [b""] == [answer.partition(b"\r\n")[0] for answer in refused]
    assert b'WWW-Authenticate: Basic realm="kvdiag"' in refused[0]
    assert allowed.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"X-Frame-Options: deny\r\n" in allowed
    assert b"kvdiag_build_info" in allowed
