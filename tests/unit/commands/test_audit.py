"""`kvdiag audit` of a server whose pool is not known: why, and what shows it."""

from tests.fixtures.hostile import Hostile
from tests.unit.commands.bad_input.refusals import call as command
from tests.unit.engines.dynamo.test_dynamo_client import worker


def test_a_worker_of_an_unknown_pool_has_the_way_to_it() -> None:
    """The front end knows the size; the missing GPU alone is no reason that helps. `doctor` says so, too."""
    with Hostile(worker("mocker-vllm-worker-load")) as server:
        audited = command("audit", "--url", server.url)
        checked = command("doctor", "--url", server.url)
    assert (3, "", 1) == (audited.code, audited.stdout, audited.stderr.count("\n"))
    assert "--metrics-url" in audited.stderr
    assert "--metrics-url" in checked.stdout
