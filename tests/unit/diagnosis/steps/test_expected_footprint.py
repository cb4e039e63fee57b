"""What an idle server's devices can hold, added up by hand."""

from dataclasses import replace

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.steps import explained_bytes
from kvdiag.model import Facts
from tests.builders.values import GIB, MIB, device, pool

KNOWN = Facts(pools=(pool(pool_bytes=10 * GIB),), weights_bytes=6 * GIB)
CARD = device(total_bytes=100 * GIB, used_bytes=20 * GIB, driver_reserved_bytes=500 * MIB)

EACH = 1100 * MIB + 8 * GIB + 500 * MIB
"""A context, 8 % of 100 GiB, and what the driver keeps."""


def test_parts_of_a_device_add_up() -> None:
    """Pool, weights, driver, context and 8 % of the device."""
    assert 16 * GIB + EACH == explained_bytes((CARD,), KNOWN, DEFAULT_LIMITS)
    untold = device(total_bytes=100 * GIB, driver_reserved_bytes=None)
    assert 16 * GIB + EACH - 500 * MIB == explained_bytes((untold,), KNOWN, DEFAULT_LIMITS)


def test_ranks_share_the_weights_and_have_a_pool_each() -> None:
    """Tensor parallel over two devices; two engines of one device each hold their own weights."""
    assert 26 * GIB + 2 * EACH == explained_bytes((CARD, CARD), KNOWN, DEFAULT_LIMITS)
    engines = replace(KNOWN, pools=(pool("0", pool_bytes=10 * GIB), pool("1", pool_bytes=10 * GIB)))
    assert 20 * GIB + 12 * GIB + 2 * EACH == explained_bytes((CARD, CARD), engines, DEFAULT_LIMITS)
    assert 40 * GIB + 12 * GIB + 4 * EACH == explained_bytes((CARD,) * 4, engines, DEFAULT_LIMITS)
    # Two engines on one visible device.
    assert 20 * GIB + 12 * GIB + EACH == explained_bytes((CARD,), engines, DEFAULT_LIMITS)


def test_nothing_is_explained_where_a_part_is_not_known() -> None:
    """Weights, the pool's size, a device's memory."""
    assert explained_bytes((CARD,), replace(KNOWN, weights_bytes=None), DEFAULT_LIMITS) is None
    assert explained_bytes((CARD,), replace(KNOWN, pools=()), DEFAULT_LIMITS) is None
    assert explained_bytes((device(used_bytes=None),), KNOWN, DEFAULT_LIMITS) is None
    assert 16 * GIB + EACH == explained_bytes((CARD, device(1, used_bytes=None)), KNOWN, DEFAULT_LIMITS)
