"""Text Generation Inference (TGI), 2 and 3."""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvdiag.engines.engine import EngineAdapter, Identity, RequestDialect
from kvdiag.engines.metrics_reader import lengths_of, parse_version
from kvdiag.engines.openai_client import OpenAIClient, shown_text
from kvdiag.engines.printed_figures import Wordings
from kvdiag.engines.tgi import metrics
from kvdiag.model import MAX_COUNT, Capabilities
from kvdiag.sources.http import Unreadable

_WORDINGS = Wordings("tgi")
_SHARDS = re.compile(r"--num-shard[ =](\d{1,4})\b")


def completion_body(
    *,
    model: str,  # noqa: ARG001 - a server has one model
    token_ids: Sequence[int],
    max_tokens: int,
    cache_salt: str | None,  # noqa: ARG001 - TGI has none
    user: str | None,  # noqa: ARG001 - TGI has none
) -> dict[str, Any]:
    """The JSON body of one request: a number as text is at least one token in any vocabulary, and `truncate` cuts the
    prompt to its length. There is no way to force the output's length: `max_new_tokens` is a limit.
    """
    return {
        "inputs": " ".join(map(str, token_ids)),
        "parameters": {"truncate": len(token_ids), "max_new_tokens": max_tokens, "do_sample": False},
    }


def generated(event: Mapping[str, Any], before: int) -> int:
    """Tokens so far: each event is one token, and the last has their number."""
    details = event.get("details")
    count = details.get("generated_tokens") if isinstance(details, dict) else None
    if type(count) is int and before <= count <= before + 1:
        return count
    return before + 1 if isinstance(event.get("token"), dict) else before


def error(event: Mapping[str, Any]) -> str | None:
    """The message of an event that reports an error."""
    message = event.get("error")
    return None if message is None else str(message)


class TgiClient(OpenAIClient):
    """Reads one TGI server."""

    async def identify(self) -> Identity:
        """The server's version, model and longest request, from GET /info; Unreadable if it is no TGI server."""
        answer = await self._http.get("/info", [])
        info = self._http.decode(answer)
        if not isinstance(info, dict) or shown_text(info.get("model_id")) is None:
            raise Unreadable("absent", "/info names no model: is this a TGI server?")
        longest = info.get("max_total_tokens")
        return Identity(
            version=shown_text(info.get("version")),
            model=shown_text(info.get("model_id")),
            root=shown_text(info.get("model_id")),
            max_model_len_tokens=longest if type(longest) is int and 0 < longest <= MAX_COUNT else None,
            server_header=answer.server,
        )


def parallel_ranks(commands: Iterable[str]) -> tuple[int, int] | None:
    """Shards by the launcher's command line; `None` where it is not visible or leaves the number to the launcher."""
    found = next(filter(None, map(_SHARDS.search, commands)), None)
    return (int(found[1]), 1) if found else None


ENGINE = EngineAdapter(
    name="tgi",
    owned_by="",  # the model's name
    capabilities=lambda page: Capabilities(
        unit="token",
        usage=metrics.CAPACITY in page,
        blocks=metrics.CAPACITY in page,
        returns=False,
        reserved=True,
        salt=False,
        forces_length=False,
    ),
    client=TgiClient,
    metrics_flag="and wait for its warm-up",
    metrics=MappingProxyType(metrics.meanings()),
    metric_prefix="tgi_",
    needed_metrics=MappingProxyType(metrics.NEEDED_NAMES),
    tested_versions=((2, 0), (3, 3)),
    parse_version=parse_version,
    config_metrics=(metrics.CAPACITY,),
    parse_engines=metrics.parse_engines,
    parse_pools=metrics.parse_pools,
    length_metrics=metrics.LENGTH_NAMES,
    parse_lengths=lambda page: lengths_of(page, metrics.LENGTH_NAMES[0], metrics.LENGTH_NAMES[1:]),
    program="text-generation",
    process_title=re.compile(r"text[-_]generation"),
    image=re.compile(r"text-generation-inference[^/]*:v?(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?[\w.+-]{0,32})$"),
    parallel_ranks=parallel_ranks,
    parse_startup_log=_WORDINGS.report,
    parse_settings=_WORDINGS.settings,
    request=RequestDialect(body=completion_body, path="/generate_stream", generated=generated, error=error),
    first_engine_headers=MappingProxyType({}),
)
