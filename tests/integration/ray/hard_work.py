"""Work that fails on a Ray cluster; `main` prints how it ends, as JSON.

It is imported and not run as a program, whose functions no node could find.
"""

import json
import os
import signal
import sys

from kvdiag.errors import KvdiagError
from kvdiag.feeds.fleet.ray_cluster import RayCluster
from kvdiag.feeds.fleet.workers import results


def refused(number: int) -> None:
    """Work that fails with a message."""
    raise KvdiagError(f"{number} cannot be used")


def broken(number: int) -> float:
    """Work with a bug."""
    return 1 / number


def killed(_: int) -> None:
    """Work whose process is killed each time."""
    os.kill(os.getpid(), signal.SIGKILL)


class Unreadable:
    """What every process but one can read."""

    def __init__(self, pid: int) -> None:
        """Refuse to be made in one process."""
        if os.getpid() == pid:
            raise ValueError("not in this process")
        self.pid = pid

    def __reduce__(self) -> tuple[type["Unreadable"], tuple[int]]:
        """As it was made."""
        return Unreadable, (self.pid,)


def main(address: str) -> None:
    """Do each, on one connection after the other."""
    ends = {}
    for work, number in ((refused, 7), (broken, 0), (Unreadable, os.getpid()), (killed, 0)):
        try:
            with RayCluster(address) as cluster:
                list(results(cluster, work, [number]))
        except (KvdiagError, ZeroDivisionError, ValueError) as error:
            ends[work.__name__] = [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
    sys.stdout.write(json.dumps(ends))
