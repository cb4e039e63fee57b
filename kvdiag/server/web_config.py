"""Reads a web configuration file in the format of Prometheus' exporters: TLS, passwords, response headers.

Format: https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md. As there, passwords
protect every page including /-/healthy, paths are relative to the configuration file, and unknown keys are errors. A
setting that Python's `ssl` does not support is refused by name, never ignored silently.
"""

from __future__ import annotations

import json
import pkgutil
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvdiag.errors import KvdiagError
from kvdiag.files import opened
from kvdiag.server.connections import Access
from kvdiag.server.passwords import HASH, Passwords, needed

MAX_FILE_BYTES = 2**20

_FORMAT: Mapping[str, Any] = json.loads(pkgutil.get_data(__package__, "web_config.json") or b"")
KNOWN: Mapping[str, Sequence[str]] = _FORMAT["known"]
"""The keys of each section that are supported."""

REFUSED: Mapping[str, str] = _FORMAT["refused"]
"""Those that are not, with what to do instead."""

HEADERS: Mapping[str, Sequence[str]] = _FORMAT["headers"]
"""The headers that can be set, with the values that each may have; any if none is named."""

CLIENT_AUTH: Mapping[str, ssl.VerifyMode] = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
"""Go's other two accept certificates without verifying them, which Python's `ssl` cannot."""

VERSIONS: Mapping[str, ssl.TLSVersion] = {
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
MAX_COST = 14
"""Of a bcrypt hash; 14 takes about a second of CPU per wrong password, 10 is usual."""

MAX_USERS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """The settings of a web configuration file. `certificate` and `key` are paths, `None` without TLS."""

    certificate: Path | None = None
    key: Path | None = None
    client_auth: ssl.VerifyMode = ssl.CERT_NONE
    client_ca_file: Path | None = None
    client_ca: str | None = None
    least_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    most_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    server_prefers: bool = True
    headers: tuple[tuple[str, str], ...] = ()
    users: Mapping[str, str] = field(default_factory=dict)

    @property
    def transport(self) -> WebConfig:
        """The TLS settings alone."""
        return replace(self, headers=(), users={})

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for connections, `None` without TLS.

        Raises:
            KvdiagError: certificates or key cannot be used.
        """
        if self.certificate is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.minimum_version, context.maximum_version = self.least_version, self.most_version
            if not self.server_prefers:
                context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
            self.load(context)
            context.verify_mode = self.client_auth
            if self.client_auth is not ssl.CERT_NONE:
                context.load_verify_locations(cafile=self.client_ca_file, cadata=self.client_ca)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise KvdiagError(f"cannot use client_ca_file or client_ca: {_reason(error)}") from error
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Load certificate and key into the context, for new connections.

        Raises:
            KvdiagError: they cannot be used.
        """
        if self.certificate is None or self.key is None:
            return
        for path in (self.certificate, self.key):
            try:
                opened(path).close()
            except OSError as error:
                raise KvdiagError(f"cannot read {path}: {(error.strerror or '').lower()}") from error
        try:
            # A key with a passphrase would have it asked for on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ssl.SSLError, ValueError) as error:
            raise KvdiagError(
                f"{self.certificate} and {self.key} are not a usable certificate and key: {_reason(error)}"
            ) from error


def access(config: WebConfig) -> tuple[Access, Passwords]:
    """The access rules and response headers of a configuration, and the passwords behind them.

    Raises:
        KvdiagError: bcrypt is not installed.
    """
    passwords = Passwords(config.users)
    return Access(allow=passwords.allow if config.users else None, headers=config.headers), passwords


def read_web_config(path: Path) -> WebConfig:
    """Read and check a web configuration file.

    Raises:
        KvdiagError: it cannot be read, is not valid, or has an unsupported setting.
    """
    try:
        with opened(path) as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    if len(text) > MAX_FILE_BYTES:
        raise KvdiagError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, too large for a web configuration")
    yaml = needed("yaml", "--web-config")
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise KvdiagError(f"{path} has YAML aliases, which are not supported: repeat the values instead")
        if repeated := _repeated(yaml.compose(text, yaml.SafeLoader)):
            raise KvdiagError(f"{path} has a key twice (line {repeated}): which of the two should count?")
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The library quotes the line, which may contain a password hash: name the place only.
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise KvdiagError(f"{path} is not valid YAML{place}") from error
    if not found:
        raise KvdiagError(f"{path} is empty: set basic_auth_users or tls_server_config, or leave out --web-config")
    return _parsed(found, path)


def _repeated(node: Any) -> int:
    """The line of a key that its mapping has already, 0 without one: of the two, YAML's readers take the last."""
    pairs = node.value if getattr(node, "id", "") == "mapping" else ()
    keys = [key.value for key, _ in pairs]
    own = (key.start_mark.line + 1 for place, (key, _) in enumerate(pairs) if key.value in keys[:place])
    return next(own, 0) or next(filter(None, (_repeated(value) for _, value in pairs)), 0)


def lowered(before: WebConfig, now: WebConfig) -> str | None:
    """Return which protection a new configuration removes, `None` if none."""
    if before.users and not now.users:
        return "it removes all passwords (basic_auth_users)"
    if before.certificate is not None and now.certificate is None:
        return "it removes TLS (tls_server_config)"
    if now.client_auth < before.client_auth:
        return "it no longer requires client certificates (client_auth_type)"
    if now.least_version < before.least_version or now.most_version < before.most_version:
        return "it allows older TLS versions (min_version, max_version)"
    least = min(map(_cost, before.users.values()), default=0)
    if any(_cost(hashed) < max(least, _cost(before.users.get(user, ""))) for user, hashed in now.users.items()):
        return "it has cheaper password hashes (basic_auth_users)"
    # Whether another value protects less is not judged: one word in a policy may open it.
    changed = [name for name, value in before.headers if dict(now.headers).get(name) != value]
    return f"it removes or changes the headers {', '.join(changed)}" if changed else None


def _cost(hashed: str) -> int:
    found = HASH.fullmatch(hashed)
    return int(found[1]) if found else 0


def _parsed(found: Any, path: Path) -> WebConfig:
    sections = _table(found, path, "it")
    for name in sections:
        if name in REFUSED:
            raise KvdiagError(f"{path}: {name} is not supported: {REFUSED[name]}")
        if name not in (*KNOWN, "basic_auth_users"):
            raise KvdiagError(f"{path}: unknown key {name!r}")
        if not sections[name]:
            raise KvdiagError(f"{path}: {name} is empty: fill it in or remove it")
    tls, http = (_section(sections, name, path) for name in KNOWN)
    if http.get("http2", False) is not False:
        raise KvdiagError(f"{path}: http2 is not supported: set http2: false")
    return WebConfig(
        **_tls(tls, path),
        headers=_headers(_table(http.get("headers"), path, "headers"), path),
        users=_users(_table(sections.get("basic_auth_users"), path, "basic_auth_users"), path),
    )


def _table(value: Any, path: Path, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise KvdiagError(f"{path}: {name} must be a mapping")
    return value


def _section(sections: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = _table(sections.get(name), path, name)
    for key in section:
        if key in REFUSED:
            raise KvdiagError(f"{path}: {key} of {name} is not supported: {REFUSED[key]}")
        if key not in KNOWN[name]:
            raise KvdiagError(f"{path}: unknown key {key!r} of {name}")
    return section


def _tls(section: dict[str, Any], path: Path) -> dict[str, Any]:
    if not section:
        return {}
    for key, value in section.items():
        if key != "prefer_server_cipher_suites" and not (isinstance(value, str) and value):
            raise KvdiagError(f"{path}: {key} must be a string")
    for key in ("cert_file", "key_file"):
        if key not in section:
            raise KvdiagError(f"{path}: tls_server_config has no {key}")
    auth = section.get("client_auth_type", "NoClientCert")
    if auth not in CLIENT_AUTH:
        raise KvdiagError(f"{path}: client_auth_type {auth!r} is not supported: use {' or '.join(CLIENT_AUTH)}")
    authority = "client_ca_file" in section or "client_ca" in section
    if authority != (CLIENT_AUTH[auth] is not ssl.CERT_NONE):
        raise KvdiagError(f"{path}: client_ca_file and client_auth_type (other than NoClientCert) must be set together")
    for key in ("min_version", "max_version"):
        if section.get(key, "TLS12") not in VERSIONS:
            raise KvdiagError(f"{path}: {key} {section[key]!r} is not supported: use {' or '.join(VERSIONS)}")
    least, most = section.get("min_version", "TLS12"), section.get("max_version", "TLS13")
    if least > most:
        raise KvdiagError(f"{path}: min_version {least} is above max_version {most}")
    prefers = section.get("prefer_server_cipher_suites", True)
    if not isinstance(prefers, bool):
        raise KvdiagError(f"{path}: prefer_server_cipher_suites must be true or false")
    folder = path.parent
    return {
        "certificate": folder / section["cert_file"],
        "key": folder / section["key_file"],
        "client_auth": CLIENT_AUTH[auth],
        "client_ca_file": folder / section["client_ca_file"] if "client_ca_file" in section else None,
        "client_ca": section.get("client_ca"),
        "least_version": VERSIONS[least],
        "most_version": VERSIONS[most],
        "server_prefers": prefers,
    }


def _headers(table: dict[str, Any], path: Path) -> tuple[tuple[str, str], ...]:
    for name, value in table.items():
        if name not in HEADERS:
            raise KvdiagError(f"{path}: the header {name!r} cannot be set")
        if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
            raise KvdiagError(f"{path}: the header {name} must be one line of ASCII text")
        if HEADERS[name] and value not in HEADERS[name]:
            raise KvdiagError(f"{path}: the header {name} must be {' or '.join(HEADERS[name])}")
    return tuple(table.items())


def _users(table: dict[str, Any], path: Path) -> dict[str, str]:
    if len(table) > MAX_USERS:
        raise KvdiagError(f"{path}: {len(table)} users, more than the limit of {MAX_USERS}: use client certificates")
    for user, value in table.items():
        found = HASH.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            raise KvdiagError(f"{path}: user {user!r} has no bcrypt hash: create one with htpasswd -nBC 10 {user}")
        if not 4 <= int(found[1]) <= MAX_COST:  # noqa: PLR2004 - bcrypt's own least
            raise KvdiagError(f"{path}: the hash of user {user!r} has cost {int(found[1])}, not within 4..{MAX_COST}")
    return dict(table)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error).lower()
