"""Reads one Ollama server: its loaded models, and on its own host the slots of their servers.

Each model has a llama-server child on a random port of the loopback address, which is started, ended and replaced with
the model: the children's command lines are looked at again whenever the loaded models change, or a child stops
answering.
"""

import asyncio
from pathlib import Path

import httpx2

from kvdiag.engines.engine import SOURCE, EngineAdapter, EngineReading, Identity
from kvdiag.engines.llamacpp.cell_bytes import read_cells
from kvdiag.engines.llamacpp.client import LlamaClient, server_processes
from kvdiag.engines.llamacpp.command_line import Runner, runners_of
from kvdiag.engines.ollama.runners import (
    PORT,
    Loaded,
    distinct,
    joined,
    label_of,
    labelled,
    loaded_models,
    loaded_page,
    parse_engines,
)
from kvdiag.engines.openai_client import OpenAIClient, shown_text
from kvdiag.model import Gap
from kvdiag.sources.http import HttpReader, Unreadable, no_cookies
from kvdiag.sources.prometheus_text import Page, Series


class OllamaClient(OpenAIClient):
    """Reads one Ollama server (`kvdiag.engines.engine.EngineClient`)."""

    def __init__(self, http: HttpReader, engine: EngineAdapter) -> None:
        """Read through `http`, whose base address is the server's."""
        super().__init__(http, engine)
        self._models: tuple[Loaded, ...] | None = None
        self._runners: tuple[tuple[Runner, LlamaClient], ...] = ()

    async def identify(self) -> Identity:
        """The server's version and the model that is loaded; Unreadable if it is no Ollama server."""
        version = await self._http.json("/api/version")
        models = loaded_models(await self._http.json("/api/ps"))
        contexts = [one.context_tokens for one in models if one.context_tokens]
        await self.page()
        addresses = [runner.address for runner, _ in self._runners]
        return Identity(
            version=shown_text(version.get("version")) if isinstance(version, dict) else None,
            model=models[0].name if models else None,
            root=None,
            max_model_len_tokens=min(contexts) if contexts else None,
            server_header=None,
            role=", ".join(addresses) or None,
            requests_refused=(
                "Ollama takes text alone, whose number of tokens is known only afterwards: run against the server of "
                "its loaded model, http://127.0.0.1:PORT, as `kvdiag doctor` prints it"
            ),
        )

    async def page(self, names: tuple[str, ...] = ()) -> Page:  # noqa: ARG002 - the server has no filter
        """Loaded models, and the slots of those whose servers are visible; Unreadable without an answer."""
        models = loaded_models(await self._http.json("/api/ps"))
        if models != self._models:
            self._models = models
            await self._find_runners()
        pages: list[Page] = []
        for _, client in self._runners:
            try:
                pages.append(await client.page())
            except Unreadable:
                self._models = None  # it was unloaded or replaced: look again at the next sample
                pages.append({})
        runners = [runner for runner, _ in self._runners]
        labels = distinct([label_of(runner, page, models) for runner, page in zip(runners, pages, strict=True)])
        parts = [
            labelled({**page, PORT: (Series({}, float(runner.port)),)}, label)
            for runner, page, label in zip(runners, pages, labels, strict=True)
            if page
        ]
        return joined((loaded_page(models), *parts))

    async def read(self) -> EngineReading:
        """The loaded models now, or a gap with the reason why not."""
        try:
            return parse_engines(await self.page())
        except Unreadable as error:
            return None, (Gap(source=SOURCE, kind=error.kind, reason=str(error)),)

    async def _find_runners(self) -> None:
        """Look for the models' servers, and connect to each: one may have the port of one that ended."""
        program = self.engine.program
        commands = (await server_processes(self._http.base_url, program))[1] if self._models else ()
        found = []
        for runner in runners_of(commands):
            http = HttpReader(
                httpx2.AsyncClient(
                    base_url=f"http://127.0.0.1:{runner.port}",
                    cookies=no_cookies(),
                    # The system's authorities are 3 MiB, which an address of this machine does not need.
                    verify=False,
                    trust_env=False,
                    # The server may end at any time: no connection is kept that would have to be closed.
                    limits=httpx2.Limits(max_keepalive_connections=0),
                )
            )
            client = LlamaClient(http, self.engine)
            try:
                cells = await asyncio.to_thread(read_cells, Path(runner.model))
                client.see(await http.json("/v1/models"), [runner.command], cells)
            except Unreadable:
                self._models = None  # it is still loading: look again at the next sample
                continue
            found.append((runner, client))
        self._runners = tuple(found)
