"""What the tests of the alerts' whole path need."""

import pytest

from tests.fixtures.require import require
from tests.integration.prometheus.alertmanager import alert_programs
from tests.integration.prometheus.conftest import require_prometheus
from tests.integration.prometheus.server import PrometheusEnvError


@pytest.fixture
def programs_are_here() -> None:
    """Prometheus and Alertmanager, or the reason why not."""
    require_prometheus()
    try:
        alert_programs()
    except PrometheusEnvError as error:
        require(ok=False, what=f"Alertmanager ({error})")
