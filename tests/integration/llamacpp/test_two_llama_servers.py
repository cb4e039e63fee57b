"""Two of llama.cpp's servers behind one address: kvdiag must not take them for one."""

import pytest

from tests.fixtures.load_balancer import balanced
from tests.integration.llamacpp.conftest import Start
from tests.integration.vllm.cli import kvdiag

SMALL = ("-c", "4096")
COUNTED = (*SMALL, "--metrics")
OTHER = ("-c", "8192", "-np", "2", "--metrics")


@pytest.mark.parametrize(
    ("first", "second", "by_connection"),
    [
        pytest.param(SMALL, SMALL, False, id="equal, without counters"),
        pytest.param(COUNTED, COUNTED, True, id="each connection to one", marks=pytest.mark.long),
        pytest.param(COUNTED, OTHER, False, id="unlike", marks=pytest.mark.long),
    ],
)
def test_a_run_gives_no_verdict_on_two_servers(
    llama: Start, first: tuple[str, ...], second: tuple[str, ...], *, by_connection: bool
) -> None:
    """Half of its requests do not show in what is read; the way out is the address of one of them.

    Where requests end within two samples, nothing but step 3 shows it: half of them is never all of them.
    """
    servers = [llama(*args).url for args in (first, second)]
    with balanced(servers, by_connection=by_connection) as url:
        unknown = kvdiag("run", "--url", url)
    assert 3 == unknown.code
    assert "give the address of one" in " ".join((unknown.stdout + unknown.stderr).split())


def test_one_server_behind_a_load_balancer_is_judged(llama: Start) -> None:
    """A proxy that closes each connection changes nothing."""
    with balanced([llama(*SMALL).url]) as url:
        result = kvdiag("run", "--url", url, "--output", "json")
    assert ["ok"] * 4 == [step["status"] for step in result.document["steps"]], result.not_ok
