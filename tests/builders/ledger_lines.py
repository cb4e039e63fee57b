"""A server whose pool and weights are known, and the ledger of one reading of its devices."""

from kvdiag.ledger import ledger
from kvdiag.model import Device, Facts, LedgerLine, Sample
from tests.builders.values import GIB, MIB, pool

POOL_BYTES = 6145 * 2 * MIB
SERVER = Facts(url="http://127.0.0.1:8000", pools=(pool(),), weights_bytes=6 * GIB, server_pids=(100, 101))


def lines(*devices: Device, of: Facts = SERVER) -> tuple[LedgerLine, ...]:
    """The ledger of one reading of some devices."""
    return ledger(Sample(at_seconds=1.0, devices=devices), of)


def sizes(found: tuple[LedgerLine, ...]) -> dict[str, int]:
    """Bytes by component."""
    return {line.component: line.bytes for line in found}
