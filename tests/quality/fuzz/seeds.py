"""Where fuzzing begins: something of each kind that its reader takes."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from tests.builders.allocation_profiles import answer
from tests.unit.sources.agents.publications import CENSUS_PUBLICATION, PUBLICATION
from tests.unit.sources.gguf_files import gguf

TESTS = Path(__file__).parents[2]
MAX_BYTES = 4096


def seeds() -> Iterator[tuple[str, bytes]]:
    """Name of a reader, and what it may read."""
    for path in sorted((TESTS / "fixtures" / "scrapes").glob("*.prom"))[::3]:
        lines = [line for line in path.read_text().splitlines() if "cache" in line or "num_requests" in line]
        told = [line for line in lines if not line.startswith("# HELP") and "_bucket" not in line]
        yield "page", ("\n".join(told) + "\n").encode()[:MAX_BYTES].rpartition(b"\n")[0]
    for path in sorted((TESTS / "fixtures" / "logs").glob("*.log"))[:4]:
        yield "log", path.read_bytes()[:MAX_BYTES]
    for path in sorted((TESTS / "fixtures" / "failures").rglob("*"))[:12]:
        if path.is_file():
            yield "log", path.read_bytes()[:MAX_BYTES]
            yield "remains", path.read_bytes()[:MAX_BYTES]
    for start in json.loads((TESTS / "unit" / "commands" / "fit" / "printed_starts.json").read_bytes()):
        yield "log", "\n".join(start["lines"]).encode()[:MAX_BYTES]
    trace = gzip.decompress((TESTS / "golden" / "traces" / "vllm-0.32.0-starved.jsonl.gz").read_bytes())
    short = b"\n".join(trace.split(b"\n")[:8]) + b"\n"
    yield "trace", short
    yield "segments", gzip.compress(short, mtime=0)
    yield "segments", short
    yield "remains", short
    yield "profile", json.dumps(answer()).encode()
    yield "publication", json.dumps(PUBLICATION).encode()
    yield "publication", json.dumps({**PUBLICATION, "kv_blocks": CENSUS_PUBLICATION}).encode()
    yield "black_box", json.dumps({"kvdiag_black_box": 1, **PUBLICATION}).encode()
    yield "config", _CONFIG
    yield "model", _CONFIG
    yield "gguf", gguf()
    yield (
        "slots",
        b'[{"id":0,"n_ctx":512,"is_processing":true,"id_task":1,"n_prompt_tokens":9,"next_token":[{"n_decoded":1}]}]',
    )
    yield "slots", b'{"default_generation_settings":{"n_ctx":512},"total_slots":4,"is_sleeping":false}'
    yield "slots", b'{"data":[{"meta":{"n_ctx_train":512,"size":4096}}]}'
    yield "specs", b'{"kv_cache_groups": [{"type": "FullAttentionSpec", "block_size": 16, "num_kv_heads": 8}]}'
    yield "profiles", b'{"kvdiag_profiles": 1, "profiles": [{}]}'
    yield "baseline", b'{"kvdiag_baseline": 1, "server": {}, "steps": [], "figures": {}}'
    yield (
        "daemon",
        (
            b'{"version": "1", "lines": [], "snapshot": {"state": "starting", "facts": {}, "sources": [], '
            b'"newest": {"at_seconds": 1.0}}}'
        ),
    )
    yield "engine", b'{"loads": [{"dp_rank": 0, "timestamp": 1.5, "num_running_reqs": 0, "num_used_tokens": 4}]}'
    yield "request", b"GET /metrics?name[]=a&name[]=b HTTP/1.1\r\nHost: a\r\nAccept: text/plain;q=0.5"
    yield (
        "history",
        b'{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"a":"b"},"values":[[1,"2"]]}]}}',
    )
    yield "settings_file", b'[run]\nurl = "http://a"\nrecord = "x"\n[serve]\nlisten = "127.0.0.1:1"\n'
    yield "web_config", b"tls_server_config:\n  min_version: TLS12\nbasic_auth_users:\n  a: b\nhttp_server_config: {}\n"
    yield "options", b"512MiB"
    yield "options", b"12m"


_CONFIG = (
    b'{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
    b'"num_key_value_heads": 2, "vocab_size": 99, "intermediate_size": 128, "dtype": "bfloat16", '
    b'"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}}'
)
