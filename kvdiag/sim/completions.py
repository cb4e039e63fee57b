"""POST /v1/completions and /tokenize as vLLM 0.32 reads them: a JSON body becomes a `Completion`, or vLLM's error.

Checked in this order: JSON, model, stream options, cache salt, prompts, max_tokens, min_tokens; the first error is the
answer, in vLLM's words and status. Only fields that kvdiag or a test sends are read, others are ignored. Pure. Text is
tokenised byte by byte; the simulated model's tokens are random ids.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvdiag.sim.scenarios import MODEL_NAME, Scenario

FIRST_BYTE_TOKEN = 3
"""Ids 0 to 2 are padding, beginning and end; the 256 bytes follow."""

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions, and vLLM's."""


class ApiError(Exception):
    """A request that vLLM rejects, with the error object that it sends."""

    def __init__(
        self, message: str, *, kind: str = "BadRequestError", param: str | None = None, code: int = 400
    ) -> None:
        """Build the body for HTTP status `code`."""
        super().__init__(message)
        self.code = code
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A client's request. `prompts` are token ids."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    cache_salt: str | None
    stream: bool
    include_usage: bool


def parse_completion(body: bytes, limits: Scenario) -> Completion:
    """Read a completion request.

    Raises:
        ApiError: vLLM would reject it, with this message.
    """
    fields = fields_of(body)
    _check_model(fields)
    stream = _typed(fields, "stream", bool, default=False)
    options = fields.get("stream_options")
    if options is not None and not stream:
        raise _parameter_error("Stream options can only be defined when `stream=True`.", "stream_options")
    salt = fields.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise _parameter_error("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    prompts = _prompts(fields.get("prompt"), limits)
    longest = max(len(prompt) for prompt in prompts)
    asked = fields.get("max_tokens", DEFAULT_MAX_TOKENS)
    if asked is None:
        asked = limits.max_model_len_tokens
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise _validation_error("max_tokens", "Input should be a valid integer")
    # An answer longer than the context is cut silently (as in 0.32: 19998 + 5 of 20000 gives 2 tokens).
    max_tokens = min(asked, limits.max_model_len_tokens - longest)
    if max_tokens < 1:
        raise _parameter_error(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", value=max_tokens)
    min_tokens = _typed(fields, "min_tokens", int, default=0)
    if min_tokens > max_tokens:
        raise ApiError(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")
    return Completion(
        prompts=prompts,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=_typed(fields, "ignore_eos", bool, default=False),
        cache_salt=salt,
        stream=stream,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def tokenize(body: bytes, limits: Scenario) -> dict[str, Any]:
    """Answer POST /tokenize.

    Raises:
        ApiError: no prompt, or an unknown model.
    """
    fields = fields_of(body)
    _check_model(fields)
    if not isinstance(fields.get("prompt"), str):
        raise _validation_error("prompt", "Field required")
    tokens = encode(fields["prompt"])
    return {"count": len(tokens), "max_model_len": limits.max_model_len_tokens, "tokens": tokens, "token_strs": None}


def encode(text: str) -> list[int]:
    """Token ids of a text: one for each byte."""
    return [FIRST_BYTE_TOKEN + byte for byte in text.encode()]


def decode(token: int) -> str:
    """Text of one token."""
    byte = token - FIRST_BYTE_TOKEN
    return chr(byte) if ord(" ") <= byte <= ord("~") else f"<x{token}>"


def fields_of(body: bytes) -> Mapping[str, Any]:
    """The fields of a JSON body; ApiError if it is none."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _validation_error("0", "JSON decode error") from error
    if not isinstance(fields, dict):
        raise _validation_error("0", "Input should be a valid dictionary")
    return fields


def _check_model(fields: Mapping[str, Any]) -> None:
    model = fields.get("model")
    if model is not None and model != MODEL_NAME:
        message = f"The model `{model}` does not exist. Valid aliases: {MODEL_NAME}"
        raise ApiError(message, kind="NotFoundError", param="model", code=404)


def _prompts(prompt: Any, limits: Scenario) -> tuple[tuple[int, ...], ...]:
    if prompt is None or prompt == "":
        raise _parameter_error("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if prompt == []:
        raise ApiError("You must pass at least one prompt")
    batch = prompt if isinstance(prompt, list) and isinstance(prompt[0], list | str) else [prompt]
    return tuple(_prompt(one, limits) for one in batch)


def _prompt(prompt: Any, limits: Scenario) -> tuple[int, ...]:
    tokens = encode(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(tokens, list) or not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise _validation_error("prompt", "Input should be a valid list")
    if (largest := max(tokens, default=0)) >= limits.model.vocab:
        raise ApiError(f"Token id {largest} is out of vocabulary")
    if not tokens:
        raise ApiError("The decoder prompt cannot be empty")
    if len(tokens) > limits.max_model_len_tokens:
        message = (
            f"This model's maximum context length is {limits.max_model_len_tokens} tokens. However, your prompt "
            f"contains at least {len(tokens)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        raise _parameter_error(message, "input_tokens", value=len(tokens))
    return tuple(tokens)


def _typed(fields: Mapping[str, Any], name: str, kind: type, *, default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise _validation_error(name, f"Input should be a valid {kind.__name__}")
    return value


def _parameter_error(message: str, param: str, *, value: object = None) -> ApiError:
    shown = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
    return ApiError(f"{message} ({shown})", param=param)


def _validation_error(name: str, message: str) -> ApiError:
    return ApiError(
        f"1 validation error:\n  {{'loc': 'body.{name}', 'msg': '{message}'}}", kind="Bad Request", param=f"body.{name}"
    )
