"""Which fields of a config are read, observed from outside while the real code runs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from kvdiag.kv.families.config_fields import Fields

Note = Callable[[Fields, tuple[str, ...], dict[str, Any]], None]


@contextmanager
def reads_of_fields(note: Note, *methods: str) -> Iterator[None]:
    """Call `note` with the object, the names and all arguments of each call of these methods of `Fields`."""
    codes = {getattr(Fields, method).__code__ for method in methods}

    def called(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            given = dict(frame.f_locals)
            names = given["names"] if "names" in given else (given["name"],)
            note(given["self"], names, given)

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(before)
