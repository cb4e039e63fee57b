"""Connect to a server: find it, identify it, and choose the NVML that shows its GPU.

Without an address the usual ports of this host are searched, and the first server that answers is taken; its answer
shows the engine, its facts, and whether it is a drill, which has its own GPU. NVML of this machine is used only for a
server on it. A key goes only to an address that the user named, because any process can listen on a usual port. A
daemon's `Finder` searches again and again, and keeps one client for each address; `connect` is one search for the
commands that need one server now.
"""

import asyncio
import contextlib
import importlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import httpx2

import kvdiag
from kvdiag.commands.options.addresses import pasted, without_user
from kvdiag.commands.options.common import ServerAccess
from kvdiag.engines import engines_in_turn, recognise
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.server_tracker import FoundServer
from kvdiag.feeds.live.server_facts import gather_facts, read_facts
from kvdiag.model import Gap
from kvdiag.sources import host
from kvdiag.sources.agents.allocator_files import AgentReading, TorchAllocatorSource
from kvdiag.sources.device_reader import DeviceReader, DeviceReading
from kvdiag.sources.host import USUAL_PORTS, candidates
from kvdiag.sources.http import HttpReader, Unreadable, no_cookies
from kvdiag.sources.nvml import NvmlSource
from kvdiag.sources.worker_thread import ReadTimeout, ThreadedReader

DRILL_HEADER = "kvdiag-drill"
CONNECT_SECONDS = 5.0
DRIVER_START_SECONDS = 10.0
SUFFIXES = ("/metrics", "/v1", "/v1/models", "/v1/completions", "/health", "/version")


def agent_reader(folder: Path | None, *, show_request_ids: bool = False) -> ThreadedReader[AgentReading] | None:
    """Return the reader of `--agent-dir`, `None` if it is not given."""
    if folder is None:
        return None
    return ThreadedReader(TorchAllocatorSource(folder, show_request_ids=show_request_ids).read, "torch_allocator")


def base_url(url: str) -> str:
    """Return the server's base address, without the paths that people paste.

    Raises:
        KvdiagError: it is not an http or https address.
    """
    refusal = f"{url.rpartition('@')[2]!r} is not a server address: give one such as http://127.0.0.1:8000"
    return urlunsplit(pasted(url, SUFFIXES, refusal))


def without_credentials(url: str) -> str:
    """Return the address as it may be shown, recorded and passed on."""
    return urlunsplit(without_user(urlsplit(url)))


async def servers_here(own_port: int) -> dict[str, str]:
    """Every server on this host's usual ports by its address: engine, role and model, as it says without a key."""

    async def described(url: str) -> str:
        async with open_client(url, ServerAccess()) as client:
            engine = await recognise(HttpReader(client))
            try:
                identity = await engine.identify()
            except Unreadable:
                return ""
        parts = (f"{engine.engine.title} {identity.version or ''}".rstrip(), identity.role, identity.model)
        return ", ".join(filter(None, parts))

    urls = candidates(own_port)
    found = await asyncio.gather(*map(described, urls))
    return {url: server for url, server in zip(urls, found, strict=True) if server}


@asynccontextmanager
async def connect(
    url: str, access: ServerAccess, *, forced: bool = False
) -> AsyncIterator[tuple[httpx2.AsyncClient, FoundServer]]:
    """Connect to the server and identify it; the client sends it requests.

    Raises:
        KvdiagError: it cannot be reached, or is not a supported server.
    """
    finder = Finder(url, access, own_port=0)
    try:
        found = await finder.find()
        # The first answer takes longer: nvidia-ml-py is imported and the driver initialised.
        with contextlib.suppress(ReadTimeout):
            await found.nvml.ask(DRIVER_START_SECONDS, processes=False)
        yield finder.client(base_url(url)), replace(found, facts=replace(found.facts, forced=forced))
    finally:
        await finder.close()


class Finder:
    """Keeps one client per address, this machine's NVML, and those of simulated servers."""

    def __init__(self, url: str | None, access: ServerAccess, *, own_port: int) -> None:
        """Prepare without connecting.

        Raises:
            KvdiagError: the address, the key or the certificates cannot be used.
        """
        url = access.metrics_url if url is None else url
        self._url = None if url is None else base_url(url)
        self._metrics_url = None if access.metrics_url is None else base_url(access.metrics_url)
        self._own_port = own_port
        # Any process can listen on a usual port: a key goes only to an address that the user named.
        self._access = access if url is not None else replace(access, api_key=None)
        self._clients: dict[str, httpx2.AsyncClient] = {}
        self._readers: dict[str, HttpReader] = {}
        self.nvml: ThreadedReader[DeviceReading] = device_reader(self._metrics_url or self._url, drill=False)
        self._drills: dict[str, ThreadedReader[DeviceReading]] = {}
        self._host = ThreadedReader(read_facts, "host")
        for address in (self._url, self._metrics_url):
            if address is not None:
                self.client(address)

    async def find(self) -> FoundServer:
        """Return the first server that answers.

        Raises:
            KvdiagError: none does.
        """
        if self._url is not None:
            return await self._ask(self._url)
        why = []
        for url in candidates(self._own_port):
            try:
                return await self._ask(url)
            except KvdiagError as error:
                why.append(str(error))
        found = "; ".join(why) or f"nothing listens on ports {USUAL_PORTS}"
        raise KvdiagError(f"no server found on this host ({found}); wait if it is starting, or give its --url")

    async def _ask(self, url: str) -> FoundServer:
        read = self._metrics_url or url
        engine = await recognise(self._reader(read))
        front = None if read == url else await recognise(self._reader(url))
        try:
            facts, identity = await gather_facts(engine, without_credentials(read), self._host, front=front)
        except KvdiagError as error:
            if (names := await engines_in_turn(self._reader(read))) is None:
                raise
            reason = f"{names} answer at this address in turn; give the address of one of them"
            raise KvdiagError(f"{without_credentials(read)}: {reason}") from error
        facts = replace(facts, url=without_credentials(url))
        if identity.server_header != DRILL_HEADER:
            return FoundServer(facts=facts, engine=engine, nvml=self.nvml, identity=identity)
        if url not in self._drills:
            self._drills[url] = device_reader(url, drill=True)
        return FoundServer(facts=facts, engine=engine, nvml=self._drills[url], identity=identity)

    def _reader(self, url: str) -> HttpReader:
        """One reader for each address: it remembers which requests that server does not answer."""
        return self._readers.setdefault(url, HttpReader(self.client(url)))

    def client(self, url: str) -> httpx2.AsyncClient:
        """The client of an address, made once."""
        if url not in self._clients:
            self._clients[url] = open_client(url, self._access)
        return self._clients[url]

    async def close(self) -> None:
        """Close clients and drivers."""
        self._host.close()
        for nvml in (self.nvml, *self._drills.values()):
            nvml.close()
        for client in self._clients.values():
            await client.aclose()


def open_client(url: str, access: ServerAccess) -> httpx2.AsyncClient:
    """Return the client for a server's base address.

    Raises:
        KvdiagError: the key or the certificates cannot be used.
    """
    headers = {"User-Agent": f"kvdiag/{kvdiag.__version__}", **bearer(access.api_key)}
    # The environment's proxies are not for a server on this machine or in this pod.
    return httpx2.AsyncClient(
        base_url=url,
        headers=headers,
        verify=_trust(url, access),
        cookies=no_cookies(),
        trust_env=False,
        timeout=httpx2.Timeout(CONNECT_SECONDS),
        limits=httpx2.Limits(max_connections=None),
    )


def bearer(api_key: str | None) -> dict[str, str]:
    """Return the header that carries a key; none without a key.

    Raises:
        KvdiagError: it cannot be sent in a header.
    """
    # A key that comes from a file often brings its line end.
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise KvdiagError("the API key has characters that are invalid in HTTP: check KVDIAG_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def device_reader(url: str | None, *, drill: bool) -> ThreadedReader[DeviceReading]:
    """Return the NVML that shows a server's GPUs; this machine's while there is no server.

    A simulated server has its own GPU; this machine's belongs to others.
    """
    local = url is None or drill or host.is_local(urlsplit(url).hostname or "")
    remote = None
    if drill and url is not None:
        # Imported only here: it takes a MiB that a real server does not need.
        remote = importlib.import_module("kvdiag.sim").RemoteNvml(url)
    devices: DeviceReader = NvmlSource(remote)
    return ThreadedReader(devices.read if local else _elsewhere, "nvml")


def _elsewhere(*, processes: bool) -> DeviceReading:  # noqa: ARG001 - the form of a device reading
    """Return the gap for a GPU of another machine, so that this machine's is not taken for it."""
    reason = "the server and its GPU are on another machine; run kvdiag there"
    return None, (Gap(source="nvml", kind="absent", reason=reason),)


def _trust(url: str, access: ServerAccess) -> ssl.SSLContext | bool:
    file = access.ca_file
    # The system's authorities take time and memory, which a server without TLS need not cost.
    if access.insecure or (file is None and url.startswith("http://")):
        return False
    if file is None:
        return True
    try:
        return ssl.create_default_context(cafile=file)
    except (OSError, ssl.SSLError) as error:
        raise KvdiagError(f"cannot use --ca-file {file}: {error.strerror or error}") from error
