"""Versions of engines in their order: 0.10.1rc1, 0.11.0+cu128, 0.5.3.post1, llama.cpp's builds such as b6543. Pure."""

import re

MAX_VERSION_CHARACTERS = 100
_VERSION = re.compile(
    r"v?(?P<release>\d{1,9}(?:\.\d{1,9}){0,4})(?:[-_.]?(?P<stage>a|b|rc)(?P<candidate>\d{0,9}))?"
    r"(?:[-_.]?post(?P<post>\d{1,9}))?(?:[-_.]?dev(?P<dev>\d{0,12}))?(?:[-+][\w.+-]*)?"
)
_BUILD = re.compile(r"b?(?P<build>\d{3,9})(?:[-+ (][\w.() -]*)?")
_STAGES = {"a": 1, "b": 2, "rc": 3}
_DEVELOPMENT, _FINAL = 0, 4
_WITHOUT_TAGS = (0, 1)
"""The release of a build from sources without their tags (0.1.dev16489): it says nothing of what is in it."""

Order = tuple[tuple[int, ...], int, int, int, int]
"""Release, stage, candidate, post-release, development build: greater is newer."""


def order(version: str | None) -> Order | None:
    """The place of a version in the order of its engine's; `None` where it has none."""
    text = (version or "").strip()
    if not text or len(text) > MAX_VERSION_CHARACTERS:
        return None
    if (build := _BUILD.fullmatch(text)) is not None:
        return (int(build["build"]),), _FINAL, 0, 0, 1
    found = _VERSION.fullmatch(text)
    if found is None:
        return None
    parts = [int(part) for part in found["release"].split(".")]
    built = found["dev"] is not None
    if built and tuple(parts) == _WITHOUT_TAGS:
        return None
    while len(parts) > 1 and not parts[-1]:  # 0.26 is 0.26.0
        parts.pop()
    post = 0 if found["post"] is None else 1 + int(found["post"])
    # A development build of a release that is not out yet stands before its candidates.
    early = built and found["stage"] is None and not post
    stage = _DEVELOPMENT if early else _STAGES.get(found["stage"] or "", _FINAL)
    return tuple(parts), stage, int(found["candidate"] or 0), post, 0 if built else 1
