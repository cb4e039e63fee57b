import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvdiag.sim.completions import ApiError, Completion, decode, encode, parse_completion, tokenize
from kvdiag.sim.scenarios import THREE_B, Scenario

SERVED = Scenario(name="", summary="", model=replace(THREE_B, vocab=1000), max_model_len_tokens=100)


def completion(**fields: Any) -> Completion:
    """The completion that these fields ask for."""
    return parse_completion(json.dumps({"prompt": [1, 2, 3], **fields}).encode(), SERVED)


def test_a_plain_request_has_openai_s_defaults() -> None:
    """A prompt alone gives sixteen tokens, whole, with end token and cache as they come."""
    assert (
        Completion(
            prompts=((1, 2, 3),),
            max_tokens=16,
            min_tokens=0,
            ignore_eos=False,
            cache_salt=None,
            stream=False,
            include_usage=False,
        )
        == completion()
    )


def test_all_that_a_probe_asks_for_is_read() -> None:
    """Streaming, usage, lengths, end token and salt arrive as asked for; fields that are not known are ignored."""
    actual = completion(
        model="drill",
        max_tokens=9,
        min_tokens=9,
        ignore_eos=True,
        cache_salt="pepper",
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
    )

    assert (
        Completion(
            prompts=((1, 2, 3),),
            max_tokens=9,
            min_tokens=9,
            ignore_eos=True,
            cache_salt="pepper",
            stream=True,
            include_usage=True,
        )
        == actual
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("AB", ((68, 69),)), ([7], ((7,),)), ([[7, 8], [9]], ((7, 8), (9,))), (["A", "B"], ((68,), (69,)))],
)
def test_prompts_come_as_text_or_tokens_alone_or_several(prompt: Any, expected: tuple[tuple[int, ...], ...]) -> None:
    """All four forms of a prompt give token ids."""
    assert expected == completion(prompt=prompt).prompts


def test_output_is_cut_to_the_context() -> None:
    """A longer output than the context has room for is silently cut, as vLLM 0.32 does."""
    assert 2 == completion(prompt=[5] * 98, max_tokens=50).max_tokens
    assert 97 == completion(max_tokens=None).max_tokens


REFUSED: tuple[dict[str, Any], ...] = (
    {"prompt": [5] * 101},
    {"prompt": [5] * 100},
    {"prompt": [1, 1000]},
    {"prompt": [-1]},
    {"prompt": {"a": 1}},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": ""},
    {"prompt": None},
    {"max_tokens": 0},
    {"max_tokens": "9"},
    {"max_tokens": 3, "min_tokens": 7},
    {"cache_salt": ""},
    {"stream_options": {}},
    {"stream": "yes"},
    {"model": "nope"},
)


def test_bad_requests_are_refused_in_vllm_s_words(golden: Callable[[str, str], None]) -> None:
    """What vLLM 0.32 refuses is refused with its status and the beginning of its message."""
    said = []
    for fields in REFUSED:
        with pytest.raises(ApiError) as refused:
            completion(**fields)
        assert refused.value.code == refused.value.body["error"]["code"]
        said.append(f"{refused.value.code} {refused.value}\n")
    golden("sim/refused_requests.txt", "".join(said))


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"prompt"', b"[" * 100_000])
def test_bodies_that_are_no_object_are_refused(body: bytes) -> None:
    """Anything but a JSON object is the client's error."""
    with pytest.raises(ApiError) as refused:
        parse_completion(body, SERVED)
    assert 400 == refused.value.code


def test_tokenize_counts_bytes() -> None:
    """Each byte of a text is a token, and decoding gives printable ones back."""
    actual = tokenize(b'{"prompt": "Hi"}', SERVED)
    assert {"count": 2, "max_model_len": 100, "tokens": [75, 108], "token_strs": None} == actual
    assert ("Hi", "<x1>") == ("".join(decode(token) for token in encode("Hi")), decode(1))


def test_tokenize_needs_a_prompt() -> None:
    """Without a text there is nothing to count."""
    with pytest.raises(ApiError, match="Field required"):
        tokenize(b"{}", SERVED)
