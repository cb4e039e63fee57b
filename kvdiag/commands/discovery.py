"""Find the server to watch, at its address or on the usual ports of this host; asked again and again by a daemon."""

from __future__ import annotations

from pathlib import Path

import httpx2

from kvdiag.commands.connect import DRILL_HEADER, base_url, device_reader, open_client, without_credentials
from kvdiag.engines import DEFAULT
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.server_tracker import FoundServer
from kvdiag.feeds.live.sampling import DeviceReading
from kvdiag.feeds.live.server_facts import gather_facts, host_reader
from kvdiag.sources.http import HttpReader
from kvdiag.sources.listening_ports import PORTS, candidates
from kvdiag.sources.worker_thread import ThreadedReader


class Finder:
    """Keeps one client per address, this machine's NVML, and those of simulated servers."""

    def __init__(
        self, url: str | None, *, own_port: int, api_key: str | None, ca_file: Path | None, insecure: bool
    ) -> None:
        """Prepare without connecting.

        Raises:
            KvdiagError: the address, the key or the certificates cannot be used.

        """
        self._url = None if url is None else base_url(url)
        self._own_port = own_port
        # Any process can listen on a usual port: a key goes only to an address that the user named.
        self._api_key = api_key if url is not None else None
        self._ca_file, self._insecure = ca_file, insecure
        self._clients: dict[str, httpx2.AsyncClient] = {}
        self._readers: dict[str, HttpReader] = {}
        self.nvml: ThreadedReader[DeviceReading] = device_reader(self._url, drill=False)
        self._drills: dict[str, ThreadedReader[DeviceReading]] = {}
        self._host = host_reader()
        if self._url is not None:
            self._client(self._url)

    async def find(self) -> FoundServer:
        """Return the first server that answers.

        Raises:
            KvdiagError: none does.

        """
        if self._url is not None:
            return await self._ask(self._url)
        urls = candidates(self._own_port)
        why = f"nothing listens on ports {PORTS[0]} to {PORTS[-2]} or {PORTS[-1]}"
        for url in urls:
            try:
                return await self._ask(url)
            except KvdiagError as error:
                why = str(error)
        raise KvdiagError(f"no server found on this host ({why}): is it starting? otherwise give its --url")

    async def _ask(self, url: str) -> FoundServer:
        # One for each address, however often it is asked: it remembers what was too much to be asked for again.
        engine = DEFAULT.open(self._readers.setdefault(url, HttpReader(self._client(url))))
        facts, identity = await gather_facts(engine, without_credentials(url), self._host)
        if identity.server_header != DRILL_HEADER:
            return FoundServer(facts=facts, engine=engine, nvml=self.nvml)
        if url not in self._drills:
            self._drills[url] = device_reader(url, drill=True)
        return FoundServer(facts=facts, engine=engine, nvml=self._drills[url])

    def _client(self, url: str) -> httpx2.AsyncClient:
        if url not in self._clients:
            self._clients[url] = open_client(url, api_key=self._api_key, ca_file=self._ca_file, insecure=self._insecure)
        return self._clients[url]

    async def close(self) -> None:
        """Close clients and drivers."""
        self._host.close()
        for nvml in (self.nvml, *self._drills.values()):
            nvml.close()
        for client in self._clients.values():
            await client.aclose()
