"""Identifies a Dynamo front end by its API, and a worker, which has none, by the labels of its metrics."""

import contextlib
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from kvdiag.engines.dynamo import component_metrics as metrics
from kvdiag.engines.engine import Identity
from kvdiag.engines.openai_client import OpenAIClient, shown_text
from kvdiag.formatting import plural
from kvdiag.model import MAX_COUNT
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_text import Page

MAX_HOSTS = 4
"""Of workers that are named."""


class DynamoClient(OpenAIClient):
    """Reads a front end or a worker of Dynamo."""

    async def identify(self) -> Identity:
        """Version, model and role; Unreadable if it is neither."""
        try:
            identity = await super().identify()
        except Unreadable as error:
            # A worker has no API; a front end without a model has no metrics of a worker.
            if error.kind == "absent" and (found := _worker(await self.page())) is not None:
                return found
            raise
        page = await self.page()
        context = {line.value for line in page.get(metrics.CARD_CONTEXT, ()) if 0 < line.value <= MAX_COUNT}
        version, workers = None, "its workers"
        with contextlib.suppress(Unreadable):
            version = _version(await self._http.json("/openapi.json"))
        with contextlib.suppress(Unreadable):
            workers = _workers(await self._http.json("/health"))
        return replace(
            identity,
            version=identity.version or version,
            max_model_len_tokens=identity.max_model_len_tokens or (round(min(context)) if context else None),
            role=f"front end of {workers}",
        )


def _worker(page: Page) -> Identity | None:
    labels = [line.labels for name, lines in page.items() if name.startswith(metrics.WORKER) for line in lines[:1]]
    if not labels or any(name.startswith(metrics.FRONT_END) for name in page):
        return None
    component, namespace = (
        shown_text(next((one[name] for one in labels if name in one), None))
        for name in ("dynamo_component", "dynamo_namespace")
    )
    # `model` is Dynamo's own label, `model_name` the engine's, which may be a path.
    models = (
        {line.labels[label] for lines in page.values() for line in lines[:1] if label in line.labels}
        for label in ("model", "model_name")
    )
    return Identity(
        version=None,
        model=next((shown_text(found.pop()) for found in models if len(found) == 1), None),
        root=None,
        max_model_len_tokens=None,
        server_header=None,
        role=f"Dynamo worker {component or ''}".rstrip() + (f" in namespace {namespace}" if namespace else ""),
    )


def _version(document: Any) -> str | None:
    """The version in the front end's description of its API."""
    info = document.get("info") if isinstance(document, dict) else None
    return shown_text(info.get("version")) if isinstance(info, dict) else None


def _workers(health: Any) -> str:
    """The workers that a front end knows, and their hosts, whose system ports it does not know."""
    listed = health.get("instances") if isinstance(health, dict) else None
    workers: dict[Any, str | None] = {}
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and one.get("endpoint") == "generate" and isinstance(one.get("instance_id"), int):
            transport = one.get("transport")
            address = transport.get("tcp") if isinstance(transport, dict) else None
            with contextlib.suppress(ValueError):
                workers[one["instance_id"]] = urlsplit(f"tcp://{shown_text(address) or ''}").hostname
    hosts = sorted({host for host in workers.values() if host})
    where = f" on {', '.join(hosts[:MAX_HOSTS])}{', ...' if len(hosts) > MAX_HOSTS else ''}" if hosts else ""
    return f"{plural(len(workers), 'worker')}{where}"
