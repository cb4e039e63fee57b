"""Colours of the ledger's components, the same on every page that shows them."""

from __future__ import annotations

from collections.abc import Mapping

PARTS: Mapping[str, tuple[str, str]] = {
    "weights": ("#d98200", "#e8a23a"),
    "kv_held": ("#0b62a8", "#3f93dd"),
    "kv_free": ("#a9cdea", "#24567f"),
    "kv_pool": ("#5b9bd0", "#2f78b7"),
    "torch_other": ("#00705c", "#2fae92"),
    "torch_pending": ("#56b59f", "#1d7d69"),
    "torch_private": ("#2f9480", "#46c4a9"),
    "torch_releasable": ("#b5ddd2", "#1c5a4d"),
    "torch_unused": ("#93cfc0", "#24705f"),
    "torch_stranded": ("#c23b4e", "#ee7f8c"),
    "outside_torch": ("#9a7bbd", "#a78bcb"),
    "server_other": ("#6f4e96", "#c2a8e2"),
    "process": ("#b0568b", "#dd86b8"),
    "other_process": ("#8e1f5f", "#e0559f"),
    "driver_reserved": ("#6d7782", "#8d98a4"),
    "unaccounted": ("#3b4249", "#c9d1d9"),
}
"""Of a ledger's components, on light and on dark: a family of shades for the pool, torch, and what is not the server's.

Neighbours differ in lightness, so that they are told apart without colour.
"""


def variables(number: int) -> str:
    """One variable of CSS for each component: on light (0) or on dark (1)."""
    return "".join(f"--p-{name}:{colors[number]};" for name, colors in PARTS.items())
