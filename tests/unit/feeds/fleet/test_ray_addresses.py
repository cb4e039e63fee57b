"""What `--ray` accepts, before anything of Ray is imported or asked."""

import importlib.util

import pytest

from kvdiag.commands import main
from kvdiag.errors import KvdiagError
from kvdiag.feeds.fleet.ray_cluster import check_ray


@pytest.mark.parametrize("address", ["", "local", "ray://head:10001", "head", "head:", "head:6379x", "a b:6379", ":1"])
def test_an_address_that_is_no_clusters_is_refused(address: str) -> None:
    """Ray would start a cluster of its own for some of these, and try others forever."""
    with pytest.raises(KvdiagError, match="HOST:PORT"):
        check_ray(address)


@pytest.mark.parametrize("command", ["diagnose", "serve"])
@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_the_error_names_the_extra(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At once, without a query."""
    assert 3 == main([command, "--prometheus", "http://127.0.0.1:1", "--ray", "auto"])
    assert "pip install 'kvdiag[ray]'" in capsys.readouterr().err


def test_workers_are_of_this_machine_or_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """Not both."""
    options = ["--prometheus", "http://127.0.0.1:1", "--ray", "auto", "--workers", "2"]
    assert 3 == main(["diagnose", *options])
    assert "--workers or --ray" in capsys.readouterr().err
