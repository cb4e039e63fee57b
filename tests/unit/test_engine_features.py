"""The features that command lines and logged arguments turn on."""

import pytest

from kvdiag.engine_features import features_logged, features_on


@pytest.mark.parametrize(
    ("engine", "command", "expected"),
    [
        ("vllm", "vllm serve m --enable-lora --speculative-config={}", ("lora", "speculative_decoding")),
        ("vllm", "vllm serve m --port 1", ()),
        ("vllm", "vllm serve m --enable-lora --config f.yaml", None),
        ("vllm", "VLLM::EngineCore", None),
        ("llamacpp", "llama-server -m a --cache-type-k q8_0", ("quantized_kv",)),
        ("llamacpp", "llama-server -m a --cache-type-k f16", ()),
        ("tgi", "text-generation-launcher --num-shard 2", None),
    ],
)
def test_command_lines(engine: str, command: str, expected: tuple[str, ...] | None) -> None:
    """Command lines."""
    assert features_on(engine, ["", command]) == expected


@pytest.mark.parametrize(
    ("engine", "log", "expected"),
    [
        ("vllm", "non-default args: {'enable_lora': True, 'enforce_eager': False}", ("lora",)),
        ("vllm", "args: Namespace(enable_lora=False, speculative_config=None)", ()),
        ("vllm", "non-default args: {'enable_lora': True}\nnon-default args: {'model': 'm'}", ()),
        ("vllm", "INFO nothing", None),
        ("sglang", "server_args=ServerArgs(speculative_algorithm='EAGLE', lora_paths=[])", ("speculative_decoding",)),
        ("sglang", "server_args=ServerArgs(speculative_algorithm='')", ()),
    ],
)
def test_logged_arguments(engine: str, log: str, expected: tuple[str, ...] | None) -> None:
    """Logged arguments."""
    assert features_logged(engine, log) == expected
