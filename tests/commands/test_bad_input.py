"""Bad input through the command line: one clear line on stderr, nothing on stdout, exit 3, and never a traceback."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvdiag.feeds.codec import to_plain
from kvdiag.model import Facts, Sample
from kvdiag.sim import STORIES
from tests.e2e.cli import kvdiag
from tests.fixtures.certificates import Certificate, make_certificate
from tests.fixtures.hostile import Answer, Hostile, endless, head, raw, refused_port, reply, reply_json, silent

MIB = 2**20
SCRAPES = Path(__file__).parents[1] / "fixtures" / "scrapes"
PAGE = (SCRAPES / "vllm-0.32.0-cpu-tp2-idle.prom").read_text()
MODEL = {"id": "tiny", "root": "/models/tiny", "max_model_len": 20000}

SERVER: Mapping[str, Answer] = {
    "/v1/models": reply_json({"data": [MODEL]}),
    "/version": reply_json({"version": "0.32.0"}),
    "/metrics/": reply(PAGE),
}
"""What an idle vLLM answers."""


def refusal(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    """The one line that is said of bad input; whatever else went out or came back fails the test."""
    result = kvdiag(*arguments, env=env)
    assert (3, "", 1) == (result.code, result.stdout, result.stderr.count("\n")), result.stderr
    assert result.stderr.startswith("kvdiag: ")
    assert result.stderr.endswith("\n")
    return result.stderr.removeprefix("kvdiag: ").removesuffix("\n")


def without_details(text: str) -> str:
    """The text without what differs between versions of Python and OpenSSL."""
    return re.sub(r" \(.*?\)+:", " (…):", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["nope"], "No such command 'nope' (see kvdiag --help)", id="unknown command"),
        pytest.param(["--nope"], "No such option '--nope' (see kvdiag --help)", id="unknown option"),
        pytest.param(
            ["audit", "--nope"], "No such option '--nope' (see kvdiag audit --help)", id="unknown option of one"
        ),
        pytest.param(["diagnose"], "Missing argument 'TRACE' (see kvdiag diagnose --help)", id="missing argument"),
        pytest.param(
            ["explain", "a", "b"], "Got unexpected extra argument (b) (see kvdiag explain --help)", id="one too many"
        ),
        pytest.param(["run"], "give either --url URL or --simulate STORY (see kvdiag run --help)", id="no subject"),
        pytest.param(
            ["run", "--url", "http://127.0.0.1:1", "--simulate", "healthy"],
            "give either --url URL or --simulate STORY (see kvdiag run --help)",
            id="two subjects",
        ),
        pytest.param(
            ["run", "--url"], "Option '--url' requires an argument (see kvdiag --help)", id="option without value"
        ),
        pytest.param(
            ["diagnose", "x", "--output", "xml"],
            "Invalid value for '--output': 'xml' is not one of 'text', 'json' (see kvdiag diagnose --help)",
            id="unknown output",
        ),
        pytest.param(
            ["drill", "--port", "70000"],
            "Invalid value for '--port': 70000 is not in the range 0<=x<=65535 (see kvdiag drill --help)",
            id="impossible port",
        ),
        pytest.param(
            ["run", "--simulate", "nope"],
            f"there is no story 'nope'; there are {', '.join(STORIES)}",
            id="unknown story to run",
        ),
        pytest.param(
            ["drill", "no\nsuch\x1b[2Jstory"],
            rf"there is no story 'no\nsuch\x1b[2Jstory'; there are {', '.join(STORIES)}",
            id="unknown story to serve",
        ),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], message: str) -> None:
    """What cannot be meant is said, with where to read on, and its exit code is 3 and not click's 2."""
    # WHEN
    actual = refusal(*arguments)

    # THEN
    assert message == actual


def test_wrong_value_in_the_environment_is_told() -> None:
    """An option can be given as a variable, and is refused there as well."""
    # WHEN
    actual = refusal("diagnose", "x", env={"KVDIAG_DIAGNOSE_OUTPUT": "xml"})

    # THEN
    assert "Invalid value for '--output': 'xml' is not one of 'text', 'json' (see kvdiag diagnose --help)" == actual


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("run = [", "CONFIG is not TOML: Invalid value (at end of document)", id="no TOML"),
        pytest.param(b"\xff", "CONFIG is not TOML: 'utf-8' codec can't decode byte 0xff", id="no text"),
        pytest.param("a = " + "[" * 20_000, "CONFIG is not TOML that can be read: nested too deeply", id="nested"),
        pytest.param("[nope]\n", "CONFIG: there is no command 'nope' to set options for", id="unknown command"),
        pytest.param("run = 5\n", "CONFIG: there is no command 'run' to set options for", id="no table"),
        pytest.param("[run]\ncolour = 1\n", "CONFIG: run has no option 'colour'", id="unknown option"),
        pytest.param(
            "[run]\nca-file = ['a']\n",
            "CONFIG: 'ca-file' of run has to be a text, a number, true or false",
            id="a list",
        ),
        pytest.param(
            "[run]\nrecord = 2026-01-01\n",
            "CONFIG: 'record' of run has to be a text, a number, true or false",
            id="a date",
        ),
        pytest.param(
            "[run]\nforce = 'perhaps'\n",
            "Invalid value for '--force': 'perhaps' is not a valid boolean.",
            id="no truth",
        ),
    ],
)
def test_bad_settings_are_told(tmp_path: Path, content: str | bytes, message: str) -> None:
    """A settings file that is no TOML, or sets what there is not, is refused before anything is done."""
    # GIVEN
    path = tmp_path / "kvdiag.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    # WHEN
    actual = refusal("--config", str(path), "run", "--url", "http://127.0.0.1:1")

    # THEN
    assert message == actual.replace(str(path), "CONFIG")[: len(message)]


def test_missing_settings_are_told(tmp_path: Path) -> None:
    """A settings file that is not there says so."""
    # WHEN
    actual = refusal("--config", str(tmp_path / "nope.toml"), "run", "--url", "http://127.0.0.1:1")

    # THEN
    assert f"cannot read {tmp_path}/nope.toml: No such file or directory" == actual


def test_settings_come_after_flags(tmp_path: Path) -> None:
    """What a settings file sets is what is done where no flag says otherwise."""
    # GIVEN
    path = tmp_path / "kvdiag.toml"
    path.write_text("[run]\nurl = 'ftp://settings'\n")

    # WHEN
    actual = [refusal("--config", str(path), "run", *more) for more in ([], ["--url", "ftp://flag"])]

    # THEN
    expected = "is not the address of a server: give one such as http://127.0.0.1:8000"
    assert [f"'ftp://settings' {expected}", f"'ftp://flag' {expected}"] == actual


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


CHECK = "check the URL, is a vLLM server there?"
HTML = reply("<!DOCTYPE html>\n<html>\n<body>\nLogin\n</body>\n</html>\n", content_type="text/html")

WRONG_SERVERS = [
    pytest.param({}, f"404 on /v1/models: {CHECK}", id="another server"),
    pytest.param({"/v1/models": HTML}, f"the answer is not JSON: {CHECK}", id="HTML everywhere"),
    pytest.param(
        {"/v1/models": reply("", status=401)},
        "401 on /v1/models: the server wants a key, pass --api-key",
        id="401",
    ),
    pytest.param(
        {"/v1/models": reply("", status=403)},
        "403 on /v1/models: the server wants a key, pass --api-key",
        id="403",
    ),
    pytest.param(
        {"/v1/models": reply("", status=302, Location="/login")}, f"302 on /v1/models: {CHECK}", id="redirect"
    ),
    pytest.param({"/v1/models": reply_json([])}, "/v1/models lists no model: is this a vLLM server?", id="a list"),
    pytest.param(
        {"/v1/models": reply_json({"data": []})}, "/v1/models lists no model: is this a vLLM server?", id="no model"
    ),
    pytest.param({"/v1/models": reply("[" * 100_000)}, f"the answer is not JSON: {CHECK}", id="nested without end"),
    pytest.param({"/v1/models": raw(b"\x00" * 999)}, "the answer broke off (…)", id="garbage"),
    pytest.param({"/v1/models": silent()}, "no whole answer within 5 s on /v1/models", id="silence"),
    pytest.param({**SERVER, "/metrics/": reply("", status=404)}, f"404 on /metrics/: {CHECK}", id="no metrics"),
    pytest.param(
        {**SERVER, "/metrics/": HTML}, "answered a web page where metrics should be: check the URL", id="HTML metrics"
    ),
    pytest.param(
        {**SERVER, "/metrics/": reply("<html>\r\n</html>")},
        "the metrics page is malformed: invalid metric name:<html>",
        id="HTML that says it is text",
    ),
    pytest.param(
        {**SERVER, "/metrics/": reply("")},
        "the page has no vllm:* series: is this the metrics page of a vLLM server?",
        id="no series",
    ),
    pytest.param(
        {**SERVER, "/metrics/": reply('http_requests_total{code="2xx"} 5.0\n')},
        "the page has no vllm:* series: start the server without --disable-log-stats",
        id="--disable-log-stats",
    ),
    pytest.param(
        {**SERVER, "/metrics/": endless(head(), b"# HELP x y\n" * 9999, limit_bytes=100 * MIB)},
        "more than 16 MiB on /metrics/: not a metrics page",
        id="a page of 100 MB",
    ),
    pytest.param(
        {**SERVER, "/metrics/": reply("x{" + ",".join(f'l{n}="v"' for n in range(999_999)) + "} 1\n")},
        "the metrics page is malformed: a line has more than 16384 characters",
        id="a page of one line",
    ),
    pytest.param(
        {**SERVER, "/metrics/": endless(head(), b"#", pause_seconds=0.05)},
        "no whole answer within 5 s on /metrics/",
        id="a page that never ends",
    ),
    pytest.param(
        {**SERVER, "/metrics/": reply(gzip.compress(bytes(64 * MIB)), Content_Encoding="gzip")},
        "the answer on /metrics/ is packed (…) although that was not asked for",
        id="a packed bomb",
    ),
]


@pytest.mark.parametrize(("answers", "message"), WRONG_SERVERS)
def test_server_that_is_no_vllm_is_told(answers: Mapping[str, Answer], message: str) -> None:
    """A server that is something else, wants a key, or misbehaves is one line with what to look at."""
    # WHEN
    with Hostile(answers) as server:
        actual = refusal("run", "--url", server.url)

    # THEN
    assert f"URL: {message}" == re.sub(r" \([^)]*\)+", " (…)", actual.replace(server.url, "URL"))


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


def page_with(name: str, value: str) -> str:
    """A page on which one gauge has another value."""
    return re.sub(rf"(?m)^({name}{{[^}}]*}}) .*$", rf"\g<1> {value}", PAGE)


@pytest.mark.parametrize(
    ("value", "told"),
    [("NaN", "nan"), ("-1.0", "-1"), ("1e300", "1e+300"), ("9" * 400, "inf")],
    ids=lambda text: text[:6],
)
def test_impossible_count_is_a_gap(value: str, told: str) -> None:
    """A count that is NaN, negative or huge is named as a reading that failed, and the rest is shown."""
    # GIVEN
    page = page_with("vllm:num_requests_running", value)

    # WHEN
    with Hostile({**SERVER, "/metrics/": reply(page)}) as server:
        result = kvdiag("audit", "--url", server.url, "--output", "json")

    # THEN
    reason = f"vllm:num_requests_running of engine 0 is {told}: not a possible figure"
    assert (0, "") == (result.code, result.stderr)
    assert {"source": "vllm", "kind": "failed", "reason": reason} in result.document["gaps"]
    assert ["kv_held", "kv_free"] == [line["component"] for line in result.document["ledger"]]


@pytest.mark.parametrize(("value", "told"), [("NaN", "nan"), ("-0.5", "-0.5"), ("1e300", "1e+300")])
def test_impossible_usage_leaves_nothing_to_show(value: str, told: str) -> None:
    """A usage that cannot be, where nothing else is seen, is the reason why nothing is shown."""
    # GIVEN
    page = page_with("vllm:kv_cache_usage_perc", value)

    # WHEN
    with Hostile({**SERVER, "/metrics/": reply(page)}) as server:
        actual = refusal("audit", "--url", server.url)

    # THEN
    assert f"nothing to audit: KV usage of engine 0 is {told}: not a possible figure" == actual


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(reply("garbage"), id="garbage"),
        pytest.param(reply_json({"driver_version": "1", "devices": [{}]}), id="no GPU"),
        pytest.param(reply("[" * 100_000), id="nested without end"),
        pytest.param(endless(head(), b" " * 65536, limit_bytes=100 * MIB), id="100 MB"),
    ],
)
def test_server_that_plays_a_drill_is_not_trusted(gpu: Answer) -> None:
    """Who says that it is a drill, and shows no GPU for it, is a server without one."""
    # GIVEN
    version = reply(b'{"version":"0.32.0"}', content_type="application/json", Server="kvdiag-drill")

    # WHEN
    with Hostile({**SERVER, "/version": version, "/drill/nvml": gpu}) as server:
        result = kvdiag("audit", "--url", server.url, "--output", "json")

    # THEN
    assert (0, "", []) == (result.code, result.stderr, result.document["devices"])
    assert ["nvml"] == [gap["source"] for gap in result.document["gaps"] if gap["source"] == "nvml"]


@pytest.mark.parametrize("name", ["\ud800", "", "x" * 5000, 7, None])
def test_model_without_a_name_is_told(name: object) -> None:
    """A server whose model has no name that could be asked for is refused."""
    # WHEN
    with Hostile({**SERVER, "/v1/models": reply_json({"data": [{**MODEL, "id": name}]})}) as server:
        actual = refusal("run", "--url", server.url)

    # THEN
    assert "the server does not name its model, so nothing can be asked of it" == actual


def line(**value: object) -> bytes:
    """One line of a trace."""
    return json.dumps(value).encode() + b"\n"


HEADER = line(kvdiag_trace=1, kvdiag_version="0.1.0", facts=to_plain(Facts(url="http://127.0.0.1:8000")))
SAMPLES = b"".join(line(sample=to_plain(Sample(at_seconds=float(number)))) for number in range(9))
NO_TRACE = "TRACE is not a trace of kvdiag: its first line is no header"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "cannot read TRACE: No such file or directory", id="missing"),
        pytest.param(b"", NO_TRACE, id="empty"),
        pytest.param(PAGE.encode(), NO_TRACE, id="a metrics page"),
        pytest.param(HEADER[:40], NO_TRACE, id="torn in its header"),
        pytest.param(gzip.compress(HEADER)[:15], NO_TRACE, id="torn in its packed header"),
        pytest.param(
            line(kvdiag_trace=2, kvdiag_version="0.9.0\n\x1b[2J"),
            "TRACE is a trace of format 2, this kvdiag reads 1: use kvdiag 0.9.0 [2J",
            id="newer",
        ),
        pytest.param(
            HEADER + SAMPLES + b"garbage\n" + SAMPLES,
            "TRACE, line 11: Expecting value: line 1 column 1 (char 0)",
            id="a corrupt line",
        ),
        pytest.param(
            HEADER + b'{"sample":{"at_seconds":NaN}}\n', "TRACE, line 2: NaN is not a number", id="a reading of NaN"
        ),
        pytest.param(
            HEADER + line(sample={"at_seconds": 1, "a\nb\x1b[2J": 1}),
            r"TRACE, line 2: Sample has no field 'a\nb\x1b[2J'",
            id="a field that would clear the screen",
        ),
        pytest.param(
            b"\x1f\x8b" + b"garbage" * 99, "cannot read TRACE: Unknown compression method", id="corrupt, packed"
        ),
    ],
)
def test_bad_trace_is_told(tmp_path: Path, content: bytes | None, message: str) -> None:
    """A trace that is missing, torn, corrupt, newer, or none is one line that says which."""
    # GIVEN
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)

    # WHEN
    actual = refusal("diagnose", str(path))

    # THEN
    assert message == actual.replace(str(path), "TRACE")


def test_torn_trace_is_judged_without_its_last_line(tmp_path: Path) -> None:
    """A trace whose writer was killed is judged by its whole lines, as if the last one had never been begun."""
    # GIVEN
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    whole.write_bytes(HEADER + SAMPLES)
    torn.write_bytes(HEADER + SAMPLES + b'{"sample":{"at_sec')

    # WHEN
    expected, actual = (kvdiag("diagnose", str(path), "--output", "json") for path in (whole, torn))

    # THEN too little to judge by
    assert expected == actual
    assert (3, "unknown") == (actual.code, actual.document["worst"])


@pytest.mark.parametrize("place", ["nowhere/trace.jsonl", ".", "full"])
def test_place_for_the_trace_is_checked_first(tmp_path: Path, place: str) -> None:
    """A trace that cannot be written is said before anything is asked of the server."""
    # GIVEN
    (tmp_path / "full").symlink_to("/dev/full")

    # WHEN
    with Hostile(SERVER) as server:
        actual = refusal("run", "--url", server.url, "--record", str(tmp_path / place))

    # THEN
    problems = {"nowhere/trace.jsonl": "No such file or directory", ".": "Is a directory"}
    assert f"cannot record to {tmp_path / place}: {problems.get(place, 'No space left on device')}" == actual
    assert "/v1/completions" not in server.requests


def test_port_that_is_taken_is_told() -> None:
    """A drill on a port that somebody has says so."""
    # WHEN
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        actual = refusal("drill", "healthy", "--port", str(port))

    # THEN
    assert f"cannot serve on port {port}: " == actual[: len(f"cannot serve on port {port}: ")]
    assert actual.endswith("already in use; --port 0 takes a free one")


@pytest.fixture
def small_trace(tmp_path: Path) -> Path:
    """A trace that can be judged."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(HEADER + SAMPLES)
    return path


@pytest.mark.parametrize("output", ["text", "json"])
def test_reader_that_has_gone_is_no_verdict(small_trace: Path, output: str) -> None:
    """When nobody reads the output any more kvdiag ends quietly, with the exit code that claims nothing."""
    # GIVEN a pipe that nobody reads
    reading, writing = os.pipe()
    os.close(reading)

    # WHEN
    command = [sys.executable, "-m", "kvdiag", "diagnose", str(small_trace), "--output", output]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)

    # THEN
    assert (3, "") == (done.returncode, done.stderr)


def test_disk_without_room_for_the_output_is_told(small_trace: Path) -> None:
    """A result that cannot be written is an error, and not an empty file beside a verdict."""
    # WHEN
    command = [sys.executable, "-m", "kvdiag", "diagnose", str(small_trace), "--output", "json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)

    # THEN
    assert (3, "kvdiag: cannot print the result: No space left on device\n") == (done.returncode, done.stderr)


def test_text_goes_out_in_any_encoding(tmp_path: Path) -> None:
    """A model's name that the terminal's encoding does not have is shown with question marks."""
    # GIVEN
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line(kvdiag_trace=1, facts={"model": "modèle"}) + SAMPLES)

    # WHEN
    actual = kvdiag("diagnose", str(path), env={"PYTHONIOENCODING": "ascii"})

    # THEN
    assert (3, "") == (actual.code, actual.stderr)
    assert "mod?le" in actual.stdout
