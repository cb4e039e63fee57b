"""Sizes on the command line: 512MiB, 2GB, or bytes."""

from __future__ import annotations

from typing import Any

import click

from kvdiag.errors import KvModelError
from kvdiag.kv.fit.gpu_catalogue import parse_bytes


class Size(click.ParamType[int]):
    """Bytes, at least so many, given as a number and its unit."""

    name = "size"

    def __init__(self, least_bytes: int) -> None:
        """Keep the bound."""
        self._least = least_bytes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes of a text such as 512MiB."""
        try:
            size = parse_bytes(str(value), field="it")
        except KvModelError as error:
            self.fail(f"{value!r} is no size: give a number and its unit, such as 512MiB ({error})", param, ctx)
        if size < self._least:
            self.fail(f"{value} is less than {self._least >> 20}MiB", param, ctx)
        return size
