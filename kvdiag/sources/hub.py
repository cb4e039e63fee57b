"""A model's config from the Hugging Face Hub: one file, bounded in size and in the time for all of it."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import aclosing

import httpx2

from kvdiag.errors import KvdiagError
from kvdiag.formatting import format_duration
from kvdiag.sources.http import UNPACKED, Unreadable, gathered, no_cookies, unpacked
from kvdiag.sources.worker_thread import DaemonThreadPool

HUB = "https://huggingface.co"
NETWORK_SECONDS = 10.0
"""Until a connection is made, or the next bytes come."""

WHOLE_SECONDS = 30.0
"""For all of it, redirects and looking up names among it."""


class UnreachableHubError(KvdiagError):
    """The Hub did not answer, or not in time."""


def read_config(model: str, limit_bytes: int, *, whole_seconds: float = WHOLE_SECONDS) -> tuple[str, bytes]:
    """Where the config of a Hub id is, and its content.

    Raises:
        UnreachableHubError: the Hub does not answer, or not all of the config comes in time.
        KvdiagError: there is none.
    """
    endpoint = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
    url = f"{endpoint}/{model}/resolve/main/config.json"
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token and endpoint.startswith("https://") else {}
    try:
        return url, asyncio.run(_fetched(url, headers, limit_bytes, whole_seconds))
    except TimeoutError as error:
        raise UnreachableHubError(
            f"{endpoint} has not sent all of {model}'s config within {format_duration(whole_seconds)}; "
            "give a folder or a config.json"
        ) from error
    except Unreadable as error:
        raise KvdiagError(f"{url}: {error}; give a folder or a config.json instead") from error
    except httpx2.HTTPError as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UnreachableHubError(
            f"cannot reach {endpoint} for {model}: {reason}; give a folder or a config.json"
        ) from error


async def _fetched(url: str, headers: Mapping[str, str], limit_bytes: int, whole_seconds: float) -> bytes:
    # Looking up a name may hang longer than anything else here.
    asyncio.get_running_loop().set_default_executor(DaemonThreadPool())
    async with (
        asyncio.timeout(whole_seconds),
        httpx2.AsyncClient(
            timeout=NETWORK_SECONDS, follow_redirects=True, headers=dict(headers), cookies=no_cookies()
        ) as client,
        client.stream("GET", url, headers=UNPACKED) as response,
    ):
        if not response.is_success:
            raise Unreadable("failed", f"answered {response.status_code}", status=response.status_code)
        async with aclosing(unpacked(response, "the Hub")) as chunks:
            return bytes(await gathered(chunks, limit_bytes, "the Hub, which no config has"))
