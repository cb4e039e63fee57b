"""Reads one llama.cpp server: /props, /slots, and /metrics no more often than needed.

- /slots has the tokens of each slot. It, /metrics and inference share one queue, so that an answer waits for the
  current batch.
- A server with --sleep-idle-seconds counts a read of /slots as work (b11549: read each second, it never falls asleep;
  read while it sleeps, it wakes and loads its model). Of such a server /slots is read only while /metrics, which does
  neither, reports running requests.
- A read of /metrics restarts the two means `prompt_tokens_seconds` and `predicted_tokens_seconds`, for its other
  readers too. Counters and waiting requests are read from it every `METRICS_SECONDS`, as Prometheus does; in between
  they are missing, not old. Where /slots is off, or would keep the server awake, it is read each time.
- /props is read at every other sample. Of two servers that answer by turns, two requests a sample would always meet
  the same one with /slots, and never show that there is another. Where the command line is unknown, an answer that is
  as old as the shortest --sleep-idle-seconds is not used: the server may sleep by then.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvdiag.engines.engine import SOURCE, EngineAdapter, EngineReading, Identity
from kvdiag.engines.llamacpp.cell_bytes import read_cells
from kvdiag.engines.llamacpp.command_line import ENVIRONMENT, Options, parse_options, runners_of
from kvdiag.engines.llamacpp.slots import (
    PROCESSING,
    RUNNING,
    SLEEPING,
    TOKENS,
    model_meta,
    parse_engines,
    server_page,
    slots_of,
    slots_page,
    weights_bytes,
)
from kvdiag.engines.openai_client import OpenAIClient, shown_text
from kvdiag.formatting import plural
from kvdiag.kv.pools.cell_model import CellModel
from kvdiag.model import MAX_COUNT, Gap, Lengths
from kvdiag.sources import host, served_model
from kvdiag.sources.http import HttpReader, Unreadable
from kvdiag.sources.prometheus_text import Page

METRICS_SECONDS = 15.0
"""Prometheus' usual interval."""

HOST_SECONDS = 10.0
"""Longest wait for the command lines of the processes on this host."""

SHORTEST_IDLE_SECONDS = 1.0
"""The least value of --sleep-idle-seconds."""

NOT_IMPLEMENTED = 501
"""The status of an endpoint that is turned off."""

KEEPS_AWAKE = (
    "the server sleeps when idle (--sleep-idle-seconds), and reading its slots would keep it awake: "
    "start it with --metrics"
)


class LlamaClient(OpenAIClient):
    """Reads one llama.cpp server (`kvdiag.engines.engine.EngineClient`)."""

    def __init__(self, http: HttpReader, engine: EngineAdapter, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read through `http`, whose base address is the server's."""
        super().__init__(http, engine)
        self._clock = clock
        self._models: Any = None
        self._options: Options | None = None
        self._cells: CellModel | None = None
        self._off: set[str] = set()
        self._scraped_seconds: float | None = None
        self._sleeps = False
        self._newest_props: dict[str, Any] | None = None
        self._props_seconds = 0.0
        self._tasks: dict[int, int | None] = {}
        """The task that each slot had when it was read first."""

    async def identify(self) -> Identity:
        """The server's build, model and context of a slot; Unreadable if it is a router of several servers."""
        answer = await self._http.get("/v1/models", [])
        models = self._http.decode(answer)
        props = await self._props()
        if props.get("role") == "router":
            raise Unreadable("refused", await self._router())
        entries = models.get("data") if isinstance(models, dict) else None
        first = entries[0] if isinstance(entries, list) and entries else None
        if not isinstance(first, dict):
            raise Unreadable("absent", f"/v1/models lists no model: is this a {self.engine.title} server?")
        pids, commands = await server_processes(self._http.base_url, self.engine.program)
        self.see(models, commands, await model_cells(shown_text(props.get("model_path")), pids))
        settings = props.get("default_generation_settings")
        longest = settings.get("n_ctx") if isinstance(settings, dict) else None
        longest = model_meta(models).get("n_ctx") if longest is None else longest
        return Identity(
            version=shown_text(props.get("build_info")),
            model=shown_text(first.get("id")),
            root=None,
            max_model_len_tokens=longest if type(longest) is int and 0 < longest <= MAX_COUNT else None,
            server_header=answer.server,
            weights_bytes=weights_bytes(models),
        )

    async def _router(self) -> str:
        """Why a router is not read, and the addresses of its models' servers where they are on this host."""
        _, commands = await server_processes(self._http.base_url, self.engine.program)
        loaded = ", ".join(one.address for one in runners_of(commands))
        where = loaded or "none is loaded or visible; they are its child processes, --port in their command lines"
        return f"this is llama.cpp's router of several models: give the address of one model's server ({where})"

    def see(self, models: object, commands: Sequence[str], cells: CellModel | None = None) -> None:
        """Take the answer of /v1/models, the command lines of the server's processes, and its model as they are."""
        self._models = models
        self._cells = cells
        self._options = parse_options(commands)
        self._off.clear()

    async def page(self, names: tuple[str, ...] = ()) -> Page:  # noqa: ARG002 - the server has no filter
        """Slots, settings and metrics, as far as the server reports them; Unreadable without an answer."""
        return await self._page(scrape=True)

    async def read(self) -> EngineReading:
        """The engine now, or a gap with the reason why not."""
        try:
            return parse_engines(await self._page(scrape=self._is_due(), props=self._kept_props()))
        except Unreadable as error:
            return None, (Gap(source=SOURCE, kind=error.kind, reason=str(error)),)

    async def lengths(self) -> Lengths | None:
        """None: the server does not report how long its requests were."""
        return None

    async def clean_up(self) -> str | None:
        """Erase the slots that have had requests since the first sample, where the server allows it."""
        try:
            slots = slots_of(await self._http.json("/slots"))
        except Unreadable:
            return None
        used = [one for one in slots if not one.processing and one.task != self._tasks.get(one.number, one.task)]
        left_tokens = 0
        for slot in used:
            try:
                await self._http.get(f"/slots/{slot.number}", [("action", "erase")], body={})
            except Unreadable:
                left_tokens += slot.tokens or 0
        if not left_tokens:
            return None
        return (
            f"{plural(left_tokens, 'token')} of this run stay in idle slots as a prefix cache until other requests "
            "need their cells; a server with --slot-save-path lets kvdiag erase them"
        )

    def _kept_props(self) -> dict[str, Any] | None:
        """The settings of the sample before, once; `None` where they are to be read."""
        kept, self._newest_props = self._newest_props, None
        is_old = self._options is None and self._clock() - self._props_seconds >= SHORTEST_IDLE_SECONDS
        return None if self._sleeps or is_old else kept

    async def _page(self, *, scrape: bool, props: dict[str, Any] | None = None) -> Page:
        if props is None:
            self._props_seconds = self._clock()
            props = self._newest_props = await self._props()
        page = dict(server_page(props, self._models, self._options, self._cells))
        if any(line.value for line in page.get(SLEEPING, ())):
            self._sleeps = True
            return {**page, TOKENS: ()}
        sleeps = self._sleeps or (self._options is not None and self._options.sleep_idle_seconds is not None)
        if "/slots" in self._off or sleeps:
            page |= await self._metrics()
        if sleeps and RUNNING not in page:
            raise Unreadable("absent", KEEPS_AWAKE)
        if not sleeps or any(line.value for line in page[RUNNING]):
            page |= await self._slots()
            busy = page.get(PROCESSING, ())
            # A request waits only while every slot is taken.
            crowded = bool(busy) and all(line.value for line in busy)
            if RUNNING not in page and (scrape or (crowded and self._is_due())):
                page |= await self._metrics()
        elif "/slots" not in self._off:
            page[TOKENS] = ()
        return page

    def _is_due(self) -> bool:
        now_seconds = self._clock()
        return self._scraped_seconds is None or now_seconds - self._scraped_seconds >= METRICS_SECONDS

    async def _props(self) -> dict[str, Any]:
        props = await self._http.json("/props")
        if not isinstance(props, dict):
            raise Unreadable("refused", f"/props is not a JSON object: is this a {self.engine.title} server?")
        for name in ("slots", "metrics"):
            if props.get(f"endpoint_{name}") is False:
                self._off.add(f"/{name}")
        return props

    async def _slots(self) -> Page:
        return await self._if_on("/slots", self._read_slots)

    async def _read_slots(self) -> Page:
        slots = slots_of(await self._http.json("/slots"))
        for slot in slots:
            self._tasks.setdefault(slot.number, slot.task)
        return slots_page(slots)

    async def _metrics(self) -> Page:
        self._scraped_seconds = self._clock()
        return await self._if_on("/metrics", super().page)

    async def _if_on(self, path: str, read: Callable[[], Any]) -> Page:
        """What an endpoint reports; nothing where it is turned off."""
        if path in self._off:
            return {}
        try:
            page: Page = await read()
        except Unreadable as error:
            if error.status != NOT_IMPLEMENTED:
                raise
            self._off.add(path)
            return {}
        return page


async def server_processes(base_url: str, program: str) -> tuple[Sequence[int], Sequence[str]]:
    """The processes of the server at an address and their command lines, where they are on this host."""
    try:
        async with asyncio.timeout(HOST_SECONDS):
            pids, _ = await asyncio.to_thread(host.find_server, base_url, program)
            return pids or (), await asyncio.to_thread(host.commands, pids or (), ENVIRONMENT)
    except TimeoutError:
        return (), ()


async def model_cells(path: str | None, pids: Sequence[int]) -> CellModel | None:
    """What the model that a server reports keeps in its caches; `None` where its file is not on this host."""
    try:
        async with asyncio.timeout(HOST_SECONDS):
            file = await asyncio.to_thread(served_model.model_file, path, pids)
            return None if file is None else await asyncio.to_thread(read_cells, file)
    except TimeoutError:
        return None
