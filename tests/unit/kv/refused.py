"""The one way to say that a value is refused."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvdiag.errors import KvModelError


@contextmanager
def refused(field: str) -> Iterator[pytest.ExceptionInfo[KvModelError]]:
    """The block raises a KvModelError that names `field`."""
    with pytest.raises(KvModelError) as caught:
        yield caught
    assert field == caught.value.field
    assert "inf" not in str(caught.value).split(), "a limit that does not exist"
