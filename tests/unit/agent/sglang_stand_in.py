"""A stand-in for SGLang's scheduler with the attributes of 0.5.23 that the census reads, and the moves of its pages."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

PAGE_TOKENS = 16


class FINISH_ABORT:  # noqa: N801 - SGLang's name
    """sglang.srt.managers.schedule_batch.FINISH_ABORT."""

    status_code: int | None = None


class FINISH_LENGTH:  # noqa: N801 - SGLang's name
    """sglang.srt.managers.schedule_batch.FINISH_LENGTH."""


class Tensor(list[Any]):
    """torch.Tensor, of numbers or of rows."""

    def __getitem__(self, index: Any) -> Any:
        """A slice is a tensor, too."""
        found = super().__getitem__(index)
        return Tensor(found) if isinstance(index, slice) else found

    def tolist(self) -> list[Any]:
        """Its numbers."""
        return [*self]


class Request:
    """sglang.srt.managers.schedule_batch.Req."""

    def __init__(self, rid: str, row: int, pages: int, cached_pages: int) -> None:
        """A request that runs."""
        self.rid = rid
        self.origin_input_ids = [0] * 30
        self.output_ids = [0] * 5
        self.finished_reason: Any = None
        self.to_finish: Any = None
        self.is_retracted = False
        # The last page is not full.
        self.kv: Any = SimpleNamespace(
            req_pool_idx=row,
            kv_allocated_len=(cached_pages + pages) * PAGE_TOKENS - 3,
            cache_protected_len=cached_pages * PAGE_TOKENS,
        )


class Tree:
    """sglang.srt.mem_cache.radix_cache.RadixCache."""

    page_size = PAGE_TOKENS

    def __init__(self) -> None:
        """Empty."""
        self.evictable = self.protected = 0
        self.sessions: dict[str, Any] = {}

    def evictable_size(self) -> int:
        """Tokens that no request uses."""
        return self.evictable

    def protected_size(self) -> int:
        """Tokens that requests use."""
        return self.protected

    def session_records(self) -> dict[str, Any]:
        """What streaming sessions keep."""
        return self.sessions


class Scheduler:
    """sglang.srt.managers.scheduler.Scheduler."""

    def __init__(self, pages: int) -> None:
        """Idle, with all pages free."""
        self.server_args = SimpleNamespace(pp_size=1, disaggregation_mode="null", speculative_algorithm=None)
        self.max_total_num_tokens = pages * PAGE_TOKENS
        self.forward_ct = 0
        self.tree_cache = Tree()
        self.free_now = pages
        self.token_to_kv_pool_allocator = SimpleNamespace(
            page_size=PAGE_TOKENS, available_size=lambda: self.free_now * PAGE_TOKENS
        )
        self.free(pages)
        self.rows_given = 0
        self.rows: Any = SimpleNamespace(sum=lambda: self.rows_given)
        generations = SimpleNamespace(device=SimpleNamespace(type="cpu"), numpy=lambda: self.rows)
        self.req_to_token_pool = SimpleNamespace(req_generation=generations)
        self.requests: list[Request] = []
        self.running_batch = SimpleNamespace(reqs=self.requests)
        self.last_batch: Any = None
        self.cur_batch_for_debug: Any = None
        self.chunked_req: Any = None
        self.waiting_queue: list[Request] = []
        self.attn_tp_rank, self.dp_rank = 0, None

    def free(self, pages: int) -> None:
        """As many pages are free from now on."""
        self.token_to_kv_pool_allocator.free_pages = object()
        self.free_now = pages

    def start(self, rid: str, pages: int, cached_pages: int = 0) -> Request:
        """A request takes pages; the cache has some more of it."""
        request = Request(rid, len(self.requests) + 1, pages, cached_pages)
        self.requests.append(request)
        self.rows_given += 1
        self.free(self.free_now - pages)
        return request

    def finish(self, request: Request, reason: object, *, lose: int = 0) -> None:
        """A request ends; pages that are lost are not free again."""
        # As ScheduleBatch.filter_batch does.
        self.requests = self.running_batch.reqs = [one for one in self.requests if one is not request]
        request.finished_reason = reason
        kv = request.kv
        pages = -(-kv.kv_allocated_len // PAGE_TOKENS) - kv.cache_protected_len // PAGE_TOKENS
        self.free(self.free_now + pages - lose)

    def run_batch(self, inside: Callable[[], Any]) -> Any:
        """A forward pass, within which something looks at the pool."""
        self.forward_ct += 1
        return inside()
