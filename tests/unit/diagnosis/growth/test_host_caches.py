"""Host caches: size limits from the command line or assumed by name, and growth below and above them."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.growth.components import MemoryComponent
from kvdiag.diagnosis.growth.host_caches import SizeLimit, filling, size_limit, unreported_bytes, within_its_limit
from kvdiag.diagnosis.growth.memory_series import MemoryOwner, memory_series
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.rules.benign_warmup import judge as warmup
from kvdiag.diagnosis.rules.leak_host import judge
from kvdiag.engine_memory import host_caches, limits_on_command_line
from kvdiag.model import MAX_BYTES, Evidence, Facts, Finding, HostCache, HostProcess, Sample, Status, Timeline
from tests.builders.answers import evidence, only
from tests.builders.series import Part, timeline
from tests.builders.values import GIB, MIB, engine
from tests.builders.worlds import World, facts

FACTS = replace(facts(World()), host_limit_bytes=256 * GIB)
CACHE = HostCache(name="llama.cpp's prompt cache", flag="--cache-ram", limit_bytes=4 * GIB)
MEDIA = HostCache(name="vLLM's multimodal processor cache", flag="--mm-processor-cache-gb", limit_bytes=0)
OWNER = MemoryOwner(device_uuid="", who="llama-server 7")
FAULT = Finding(id="leak.host", status="fault", summary="it grows", evidence=())
MB = 10**6
VISION = '{"model_type": "qwen2_vl", "vision_config": {}}'


def process_of(name: str) -> Part:
    """The memory as the anonymous bytes of a process of this name."""

    def part(size: int) -> Sample:
        one = HostProcess(pid=7, name=name, resident_bytes=size + GIB, anonymous_bytes=size)
        return Sample(at_seconds=0.0, host=(one,))

    return part


def growing(name: str, gb_per_hour: float) -> Timeline:
    """A process that grows for three hours."""
    return timeline("pool", hours=3.0, leak_mb_per_hour=1000.0 * gb_per_hour, part=process_of(name))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("llama-server -m a.gguf --cache-ram 2048", [("--cache-ram", 2048 * MIB)]),
        ("/usr/bin/llama-server -cram 512 -c 8192", [("-cram", 512 * MIB)]),
        ("llama-server --cache-ram 0", [("--cache-ram", 0)]),
        ("llama-server --cache-ram -1", [("--cache-ram", MAX_BYTES - 1)]),
        ("LLAMA_ARG_CACHE_RAM=16 llama-server -cram 32", [("-cram", 32 * MIB)]),
        ("LLAMA_ARG_CACHE_RAM=16 llama-server", [("LLAMA_ARG_CACHE_RAM", 16 * MIB)]),
        ("python -m vllm serve x --mm-processor-cache-gb=1.5", [("--mm-processor-cache-gb", GIB + GIB // 2)]),
        (
            "vllm serve x --swap-space 4 --kv-offloading-size 32",
            [("--kv-offloading-size", 32 * GIB), ("--swap-space", 4 * GIB)],
        ),
        ("vllm serve x --mm-processor-cache-gb 99999999999999999999", []),
        ("vllm serve x --mm-processor-cache-gb 999999999", []),
        ("other --cache-ram 2048", []),
        (
            'vllm serve x --kv-transfer-config {"kv_connector_extra_config":{"cpu_bytes_to_use":34359738368,"b":64}}',
            [("cpu_bytes_to_use", 32 * GIB)],
        ),
        (
            """vllm --kv-transfer-config '{"e": {"lmcache.local_cpu": true, "lmcache.max_local_cpu_size": 20}}'""",
            [("lmcache.max_local_cpu_size", 20 * GIB)],
        ),
        ('vllm serve x --kv-transfer-config {"not_cpu_bytes_to_use": 5, "cpu_bytes_to_use": "many"}', []),
        ("", []),
    ],
)
def test_command_line_tells_bounds(command: str, expected: list[tuple[str, int]]) -> None:
    """Flags of a program that has the cache are read in their units; what is no number, or too large, is left out."""
    assert expected == [(cache.flag, cache.limit_bytes) for cache in limits_on_command_line(command)]


@pytest.mark.parametrize(
    ("who", "changes", "expected"),
    [
        ("llama-server 7", {}, (8 * GIB, False)),
        ("container ollama 1", {}, (8 * GIB, False)),
        ("llama-server 7", {"host_caches": (CACHE,)}, (4 * GIB, True)),
        ("llama-server 7", {"host_caches": (replace(CACHE, limit_bytes=0),)}, None),
        ("VLLM::EngineCore 7", {}, None),
        ("VLLM::EngineCore 7", {"model_config": VISION}, (4 * GIB, False)),
        ("VLLM::EngineCore 7", {"model_config": "not json"}, None),
        ("python3 7", {}, None),
    ],
)
def test_bound_is_told_or_assumed(who: str, changes: dict[str, object], expected: tuple[int, bool] | None) -> None:
    """What the command line says goes before a program's default; a cache of media is none of a model of text."""
    actual = size_limit(who, replace(FACTS, **changes))  # type: ignore[arg-type]

    assert expected == (None if actual is None else (actual.limit_bytes, actual.reported))


@pytest.mark.parametrize(
    ("who", "changes", "expected"),
    [
        ("container 1", {}, 8 * GIB),
        ("container llama-server 1", {}, 0),
        ("python3 7", {}, 0),
        ("vllm-omni 7", {}, 4 * GIB),
        ("VLLM::EngineCore 7", {"engine_name": "vllm"}, 4 * GIB),
        ("API server 7", {"engine_name": "vllm"}, 4 * GIB),
        ("container 1", {"engine_name": "vllm"}, 8 * GIB),
        ("VLLM::EngineCore 7", {"engine_name": "vllm", "model_config": "{}"}, 0),
        ("VLLM::EngineCore 7", {"engine_name": "vllm", "host_caches": (MEDIA,)}, 0),
        ("VLLM::Worker_TP0 7", {"engine_name": "vllm"}, 0),
        ("container 1", {"engine_name": "sglang"}, 0),
    ],
)
def test_what_nothing_tells_may_be_a_cache(who: str, changes: dict[str, object], expected: int) -> None:
    """Of an engine that is not known the largest default counts; of one that is, what its model may have."""
    actual = unreported_bytes(who, replace(Facts(), **changes), DEFAULT_LIMITS.growth.cache_bytes)  # type: ignore[arg-type]

    assert expected == actual


@pytest.mark.parametrize(
    ("name", "gb_per_hour", "limit_gib", "status"),
    [
        ("container", 1.0, 256, "suspect"),
        ("container", 5.0, 256, "fault"),
        ("container", 0.3, 256, "fault"),
        ("container", 1.0, 27, "fault"),
        ("container", 1.0, None, "suspect"),
        ("python3", 1.0, 256, "fault"),
    ],
    ids=["may fill", "through it", "too slow", "no room for the rest", "room not told", "a program"],
)
def test_growth_that_may_be_a_cache_of_no_told_bound_is_suspect(
    name: str, gb_per_hour: float, limit_gib: int | None, status: str
) -> None:
    """Until it is through the largest bound that is usual, unless the memory ends before the cache would."""
    # An engine that is not known
    known = Facts(host_limit_bytes=None if limit_gib is None else limit_gib * GIB)
    slow = timeline("pool", hours=9.0, leak_mb_per_hour=1000.0 * gb_per_hour, part=process_of(name))
    actual = only(judge, slow if gb_per_hour < 1.0 else growing(name, gb_per_hour), known)

    assert status == actual.status
    assert ({"grown_since_first_sample", "cache_of_unknown_limit"} <= evidence(actual).keys()) == (status == "suspect")


def test_every_cap_names_its_source() -> None:
    """No bound without where it is from."""
    assert [] == [cap.name for cap in host_caches() if not cap.source or not cap.flags]


@pytest.mark.parametrize(
    ("caches", "gb_per_hour", "status", "limit_gib"),
    [
        ((CACHE,), 1.0, "ok", 4),
        ((CACHE,), 3.0, "fault", 4),
        ((), 1.0, "ok", 8),
        ((), 5.0, "fault", 8),
        (None, 1.0, "suspect", 8),
        (None, 5.0, "fault", 8),
    ],
    ids=["under", "through", "under the default", "through the default", "under an assumed one", "through it"],
)
def test_growth_is_judged_by_the_size_limit(
    caches: tuple[HostCache, ...] | None, gb_per_hour: float, status: str, limit_gib: int
) -> None:
    """Growth below a configured limit, or a default that nothing changes, is ok, below an assumed one a suspect; beyond
    any it is a fault.
    """
    actual = only(judge, growing("llama-server", gb_per_hour), replace(FACTS, host_caches=caches))

    assert (status, limit_gib * GIB) == (actual.status, evidence(actual)["cache_size_limit"])


@pytest.mark.parametrize("host_bytes", [None, 64 * GIB])
def test_a_cache_without_a_limit_is_never_ok(host_bytes: int | None) -> None:
    """Growth may be that cache or a leak, also where the host's memory is not known."""
    unlimited = replace(CACHE, limit_bytes=MAX_BYTES - 1)
    known = replace(FACTS, host_caches=(unlimited,), host_limit_bytes=host_bytes)

    assert only(judge, growing("llama-server", 1.0), known).status == "suspect"


def test_cache_that_fills_is_a_benign_warm_up_with_its_bound() -> None:
    """The verdict for what is no leak says how full the cache is."""
    (actual,) = warmup(growing("llama-server", 1.0), replace(FACTS, host_caches=(CACHE,)), DEFAULT_LIMITS)

    assert ("benign.warmup", "ok") == (actual.id, actual.status)
    assert evidence(actual)["full"] == pytest.approx(0.698, abs=0.01)


@pytest.mark.parametrize(
    ("engine", "who", "expected"),
    [
        ("vllm", "container serve 1", 8 * GIB),
        ("vllm", "container vllm 1", 8 * GIB),
        (None, "container serve 1", None),
        ("engine", "proxy 12", None),
    ],
)
def test_the_engine_tells_whose_caches_a_container_has(engine: str | None, who: str, expected: int | None) -> None:
    """A pod calls its container as it likes; a process of another program has none of the engine's caches."""
    cache = HostCache(name="vLLM's KV offloading buffer", flag="kv_offloading_size", limit_bytes=8 * GIB)

    found = size_limit(who, replace(FACTS, engine_name=engine, host_caches=(cache,)))

    assert expected == (None if found is None else found.limit_bytes)


@pytest.mark.parametrize(
    ("command", "name", "limit_bytes"),
    [
        ("llama_server --cache-ram 3", "llama.cpp's prompt cache", 3 * MIB),
        ("ollama runner -cram 3", "llama.cpp's prompt cache", 3 * MIB),
        ("vllm serve x --mm_processor_cache_gb 3", "vLLM's multimodal processor cache", 3 * GIB),
        ("vllm serve x --kv_offloading_size 3", "vLLM's KV offloading buffer", 3 * GIB),
        ("vllm serve x --swap_space 3", "vLLM's swap space", 3 * GIB),
        ('sglang serve -x {"lmcache.max_local_cpu_size": 3}', "LMCache's local cache", 3 * GIB),
        ("python -m sglang.launch_server --hicache-size 3", "SGLang's hierarchical cache", 3 * 10**9),
        ('VLLM -x {"cpu_bytes_to_use": 3}', "vLLM's CPU offloading connector", 3),
    ],
)
def test_flag_is_in_the_unit_of_its_program(command: str, name: str, limit_bytes: int) -> None:
    """llama.cpp counts MiB, vLLM GiB, SGLang GB, a connector bytes: as their documentation has it."""
    assert [(name, limit_bytes)] == [(cache.name, cache.limit_bytes) for cache in limits_on_command_line(command)]


@pytest.mark.parametrize(
    ("config", "media"),
    [
        *((f'{{"{part}": {{}}}}', True) for part in ("vision_config", "audio_config", "visual", "thinker_config")),
        ('{"mm_vision_tower": "x"}', True),
        ('{"text_config": {}}', False),
        ('["vision_config"]', False),
        ("[" * 100_000, False),
        (None, False),
    ],
)
def test_cache_of_media_is_assumed_where_the_model_takes_any(config: str | None, media: bool) -> None:
    """By its config.json; one that cannot be read says nothing."""
    found = size_limit("VLLM::EngineCore 7", Facts(model_config=config))
    assert (4 * GIB if media else None) == (None if found is None else found.limit_bytes)


def test_several_caches_bound_a_process_together() -> None:
    """Their bounds are added up and all are named; one that is off is neither."""
    known = (
        HostCache(name="vLLM's swap space", flag="--swap-space", limit_bytes=4 * GIB),
        HostCache(name="vLLM's KV offloading buffer", flag="--kv-offloading-size", limit_bytes=8 * GIB),
        MEDIA,
    )

    assert size_limit("VLLM::EngineCore 7", Facts(host_caches=known, model_config=VISION)) == SizeLimit(
        limit_bytes=12 * GIB,
        names=", ".join(f"{cache.name} ({cache.flag})" for cache in (known[1], known[0])),
        reported=True,
    )
    assert size_limit("VLLM::EngineCore 7", Facts(model_config=VISION)) == SizeLimit(
        limit_bytes=4 * GIB,
        names=f"{MEDIA.name} ({MEDIA.flag}, by default)",
        reported=False,
    )


def set_to(limit_bytes: int) -> Facts:
    """A server whose command line limits its cache."""
    return Facts(host_caches=(replace(CACHE, limit_bytes=limit_bytes),))


def grown(size_bytes: int, *, minutes: int = 80, name: str = "llama-server", power: float = 1.0) -> Timeline:
    """A process that holds so much more at last, at a steady rate, or by a power of the rest of the time."""
    samples = []
    for minute in range(minutes):
        size = 2 * GIB + round(size_bytes * (1 - (1 - minute / (minutes - 1)) ** power))
        held = HostProcess(pid=7, name=name, resident_bytes=size, anonymous_bytes=size)
        samples.append(Sample(at_seconds=60.0 * minute, engines=(engine(),), host=(held,)))
    return Timeline(samples=tuple(samples))


@pytest.mark.parametrize(
    ("known", "grown_mb", "judged", "status"),
    [
        (set_to(1000 * MB), 1050, FAULT, "ok"),
        (set_to(1000 * MB), 1051, FAULT, "fault"),
        (Facts(), 8000, FAULT, "suspect"),
        (Facts(), 8000, replace(FAULT, status="suspect"), "unknown"),
        (Facts(), 9100, FAULT, "fault"),
    ],
)
def test_growth_within_a_size_limit_is_the_caches(known: Facts, grown_mb: int, judged: Finding, status: Status) -> None:
    """A twentieth beyond it is not counted; under a bound that is only assumed a step less certain."""
    seen = memory_series(grown(grown_mb * MB), known, DEFAULT_LIMITS)
    actual = within_its_limit(judged, OWNER, seen, MemoryComponent.HOST_ANONYMOUS, known, DEFAULT_LIMITS)

    assert status == actual.status
    limit = 1000 * MB if known.host_caches else 8 * GIB
    assert [
        ("grown_since_first_sample", grown_mb * MB, "bytes", "host"),
        ("cache_size_limit", limit, "bytes"),
        ("full", grown_mb * MB / limit, "ratio", "computed"),
    ] == [
        (one.name, one.value, one.unit, one.source)[: 3 if one.name == "cache_size_limit" else 4]
        for one in actual.evidence
    ]


def test_a_cache_without_a_limit_may_take_all_of_the_host() -> None:
    """--cache-ram -1: growth is the cache's or a leak, and nothing separates the two; nothing reports it as filling."""
    known = replace(set_to(MAX_BYTES - 1), host_limit_bytes=16 * GIB)
    seen = memory_series(grown(8000 * MB), known, DEFAULT_LIMITS)
    assert (
        "suspect" == within_its_limit(FAULT, OWNER, seen, MemoryComponent.HOST_ANONYMOUS, known, DEFAULT_LIMITS).status
    )
    assert filling(grown(8000 * MB), known, DEFAULT_LIMITS, "benign.warmup") is None


def test_process_without_caches_is_judged_as_it_was() -> None:
    """Nothing is known that bounds it."""
    seen = memory_series(grown(500 * MB, name="python3"), Facts(), DEFAULT_LIMITS)
    stranger = MemoryOwner(device_uuid="", who="python3 7")
    assert FAULT is within_its_limit(FAULT, stranger, seen, MemoryComponent.HOST_ANONYMOUS, Facts(), DEFAULT_LIMITS)


@pytest.mark.parametrize(
    ("grown_mb", "limit_mb", "power", "full"),
    [(1000, 2000, 1.3, 0.5), (1000, 2000, 2, 0.5), (1050, 1000, 1, 1.05), (1060, 1000, 1, None), (10, 1000, 1, None)],
)
def test_cache_that_fills_is_told_while_it_does(grown_mb: int, limit_mb: int, power: float, full: float | None) -> None:
    """A cache is filling up to 1.05 times its limit, also while it slows down and once it has ended."""
    actual = filling(grown(grown_mb * MB, power=power), set_to(limit_mb * MB), DEFAULT_LIMITS, "benign.warmup")

    assert (full is None) == (actual is None)
    if actual is not None:
        assert ("benign.warmup", "ok") == (actual.id, actual.status)
        size = Evidence(name="grown_since_first_sample", value=grown_mb * MB, unit="bytes", source="host")
        assert size == actual.evidence[0]
        assert full == evidence(actual)["full"]


def test_cache_of_an_assumed_bound_is_not_told_as_filling() -> None:
    """A cache whose limit is only assumed, or set for another process, is not reported as filling."""
    assert filling(grown(1000 * MB), Facts(), DEFAULT_LIMITS, "benign.warmup") is None
    assert filling(grown(1000 * MB, name="python3"), set_to(2000 * MB), DEFAULT_LIMITS, "benign.warmup") is None


def test_fullest_of_two_caches_is_set_to() -> None:
    """By its share of the bound."""
    # A process without caches, and two of which the second grows by less, to more of its limit
    samples = []
    for minute in range(80):
        held = [
            HostProcess(pid=pid, name=name, resident_bytes=size, anonymous_bytes=size)
            for pid, (name, each) in enumerate((("python3", 30), ("llama-server", 20), ("VLLM::EngineCore", 12)))
            for size in [2 * GIB + each * MB * minute]
        ]
        samples.append(Sample(at_seconds=60.0 * minute, engines=(engine(),), host=tuple(held)))
    swap = HostCache(name="vLLM's swap space", flag="--swap-space", limit_bytes=1000 * MB)
    known = Facts(host_caches=(replace(CACHE, limit_bytes=4000 * MB), swap))

    actual = filling(Timeline(samples=tuple(samples)), known, DEFAULT_LIMITS, "benign.warmup")

    assert actual is not None
    assert 79 * 12 * MB / (1000 * MB) == evidence(actual)["full"]


@pytest.mark.parametrize(
    ("queries", "gb_per_hour", "status", "limit_gib"),
    [
        pytest.param(None, 1.0, "suspect", None, id="not counted"),
        pytest.param(0, 1.0, "fault", None, id="no media"),
        pytest.param(700, 1.0, "ok", 8, id="filling"),
        pytest.param(700, 5.0, "fault", 8, id="beyond its default"),
    ],
)
def test_a_cache_of_media_explains_growth_only_where_it_is_in_use(
    queries: int | None, gb_per_hour: float, status: str, limit_gib: int | None
) -> None:
    """The engine counts what it looks up in the cache: 0 of a server of text, whose growth no cache explains.

    Its default limit holds for each of the two processes of a container.
    """
    alone = growing("container", gb_per_hour)
    samples = tuple(
        replace(one, engines=tuple(replace(each, media_queries_total=queries) for each in one.engines or ()))
        for one in alone.samples
    )
    known = replace(FACTS, engine_name="vllm", model_config=None, host_caches=None)
    actual = only(judge, Timeline(samples=samples), known)
    assert (status, None if limit_gib is None else limit_gib * GIB) == (
        actual.status,
        evidence(actual).get("cache_size_limit"),
    )
