"""A server's metrics endpoint as a separate process, whose answers can be changed, and which can be restarted.

A line on its input is the condition from then on; it echoes each. At the end of its input it exits.
"""

import random
import socket
import subprocess
import sys
from pathlib import Path

from kvdiag.sources.http import MAX_ANSWER_BYTES
from kvdiag.sources.prometheus_text import MAX_PAGE_SERIES
from tests.fixtures.hostile import Answer, Hostile, Peer, endless, head, reply, reply_json, silent

END_SECONDS = 120.0
SLOW_SECONDS = 0.2
HOSTILE_BYTES, HOSTILE_SERIES = 16 * MAX_ANSWER_BYTES, 2 * MAX_PAGE_SERIES
LEAKED_RATIO = 0.042

MODEL = "<script>alert(1)</script>\x1b]0;model\x07\u202e"
"""What the server calls itself, well or not: markup, and characters that act on a terminal."""

PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{model}"}} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="{model}"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="{model}"}} {usage_ratio}
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="{model}"}} {prompt_tokens}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="1001"}} 1.0
"""

MANY_SERIES = b'vllm:num_requests_running{engine="%d"} 1\n'
LONG_SERIES = f'vllm:num_requests_running{{engine="0",model_name="{MODEL * 300}"}} 0.0\n'.encode()


class Engine:
    """The server's process, from the test's side."""

    def __init__(self) -> None:
        """Choose its port, which it keeps; `start` starts it."""
        self.port = lasting_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Have it listen; nothing where it does already."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(self.port)],
                cwd=Path(__file__).parents[3],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self.answer("well")

    def answer(self, condition: str) -> None:
        """From now on it answers so."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(condition + "\n")
        self._process.stdin.flush()
        assert condition + "\n" == self._process.stdout.readline()

    def kill(self) -> None:
        """End it as the kernel's OOM killer does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate(timeout=END_SECONDS)
            self._process = None


def lasting_port() -> int:
    """A free port that the kernel assigns to no other socket while its server is down.

    The kernel assigns ports of its ephemeral range to outgoing connections: in the end to a client of this very port,
    which then is connected to itself.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    while True:
        port = random.randrange(max(lowest // 2, 1024), lowest)  # noqa: S311 - no secret
        with socket.socket() as chosen:
            try:
                chosen.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class _Page:
    """The metrics endpoint in one condition or another."""

    def __init__(self) -> None:
        self._count = 0
        self._answers: dict[str, Answer] = {
            "well": self._well,
            "leaking": self._leaking,
            "slow": self._slow,
            "hanging": silent(head()),
            "garbage": endless(head() + b"\0\xff{{{ 1 1 1\n", b"vllm:kv_cache_usage_perc NaN\n", limit_bytes=2**16),
            "hostile": self._hostile,
            "flapping": self._by_turns,
        }
        self.condition = "well"

    def answer(self, peer: Peer) -> None:
        self._count += 1
        self._answers[self.condition](peer)

    def _well(self, peer: Peer, *, status: int = 200, usage_ratio: float = 0.0) -> None:
        page = PAGE.format(model=MODEL, usage_ratio=usage_ratio, prompt_tokens=16 * (self._count - 1))
        reply(page, status=status)(peer)

    def _leaking(self, peer: Peer) -> None:
        self._well(peer, usage_ratio=LEAKED_RATIO)

    def _slow(self, peer: Peer) -> None:
        if peer.pause(SLOW_SECONDS):
            self._well(peer)

    def _hostile(self, peer: Peer) -> None:
        """More bytes than are read, or more series, by turns."""
        if self._count % 2:
            endless(head(), LONG_SERIES, limit_bytes=HOSTILE_BYTES)(peer)
        else:
            reply(b"".join(MANY_SERIES % number for number in range(HOSTILE_SERIES)))(peer)

    def _by_turns(self, peer: Peer) -> None:
        self._well(peer, status=500 if self._count % 2 else 200)


def _serve(port: int) -> None:
    page = _Page()
    answers: dict[str, Answer] = {
        "/metrics": page.answer,
        "/metrics/": page.answer,
        "/version": reply_json({"version": "0.32.0"}),
        "/v1/models": reply_json({"data": [{"id": MODEL}]}),
    }
    with Hostile(answers, port=port):
        for line in sys.stdin:
            page.condition = line.strip()
            sys.stdout.write(line)
            sys.stdout.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
