"""What a running `kvdiag serve` knows, read back from its /api/v1/snapshot.

Its answer is no more trusted than any other server's: bounded in size, decoded field by field, and refused where a
value cannot be. Fields of a newer kvdiag are skipped.
"""

from dataclasses import dataclass

from kvdiag.model import LedgerLine, Sample, Snapshot
from kvdiag.model.codec import from_plain
from kvdiag.sources.http import HttpReader, Unreadable

PATH, HISTORY_PATH = "/api/v1/snapshot", "/api/v1/history"
FORMAT = 1
MAX_SNAPSHOT_CHARACTERS = 2 * 2**20
"""Eight GPUs with their processes and verdicts take 60 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonReading:
    """The document of /api/v1/snapshot: what a daemon of some version knows, and its ledger."""

    kvdiag_snapshot: int = FORMAT
    version: str
    snapshot: Snapshot
    lines: tuple[LedgerLine, ...]

    def __post_init__(self) -> None:
        """Refuse a document of a format that this kvdiag does not know."""
        if self.kvdiag_snapshot != FORMAT:
            raise ValueError(f"its snapshot has format {self.kvdiag_snapshot}, but this kvdiag reads format {FORMAT}")


async def read_history(http: HttpReader) -> tuple[Sample, ...]:
    """What the daemon saw in the last minutes; nothing where it does not report them, as older ones do not."""
    try:
        answer = await http.get(HISTORY_PATH)
        listed = http.decode(answer) if len(answer.text) <= MAX_SNAPSHOT_CHARACTERS else ()
        return tuple(from_plain(Sample, one, lenient=True) for one in listed)
    except (Unreadable, ValueError, TypeError):
        return ()


async def read_daemon(http: HttpReader) -> DaemonReading:
    """All that the daemon at the base URL of `http` knows now.

    Raises:
        Unreadable: it does not answer, denies access, or is no daemon of this kind; the reason says which.
    """
    try:
        answer = await http.get(PATH)
    except Unreadable as unreadable:
        reason = {
            401: "authentication required: pass --attach URL, --user and --password-file",
            403: "access denied: is --user allowed to read it?",
            404: f"it has no {PATH}: is it `kvdiag serve`, and as new as this kvdiag?",
        }.get(unreadable.status or 0)
        if reason is None:
            raise
        raise Unreadable("failed", reason, status=unreadable.status) from unreadable
    if len(answer.text) > MAX_SNAPSHOT_CHARACTERS:
        raise Unreadable("failed", f"its snapshot is larger than {MAX_SNAPSHOT_CHARACTERS >> 20} MiB")
    try:
        return from_plain(DaemonReading, http.decode(answer), lenient=True)
    except ValueError as error:
        raise Unreadable("failed", f"its answer is not a snapshot of `kvdiag serve`: {str(error)[:160]}") from error
