"""A stand-in for vLLM's scheduler with the attributes of 0.32 that the census reads, and the moves of its blocks."""

import enum
from typing import Any


class Status(enum.Enum):
    """vllm.v1.request.RequestStatus, as far as it is needed."""

    RUNNING = 1
    WAITING_FOR_REMOTE_KVS = 2
    WAITING_FOR_STREAMING_REQ = 6
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_ABORTED = 5


class Block:
    """vllm.v1.core.kv_cache_utils.KVCacheBlock."""

    __slots__ = ("block_hash", "block_id", "is_null", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        """A free block."""
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.is_null = False
        self.prev_free_block: Block | None = None
        self.next_free_block: Block | None = None


class Ends:
    """The two ends of vLLM's list of free blocks."""

    def __init__(self, pool: "Pool") -> None:
        """Of a pool."""
        self.fake_free_list_head = Block(-1)
        self.fake_free_list_tail = Block(-1)
        self.pool = pool

    def renew(self) -> None:
        """The first and the last of the free blocks as of now."""
        free = self.pool.free
        self.fake_free_list_head.next_free_block = free[0] if free else None
        self.fake_free_list_tail.prev_free_block = free[-1] if free else None


class Pool:
    """vllm.v1.core.block_pool.BlockPool."""

    def __init__(self, blocks: int) -> None:
        """All free but the null block."""
        self.num_gpu_blocks = blocks
        self.blocks = [Block(number) for number in range(blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free = self.blocks[1:]
        self.enable_caching = True
        self.cached_block_hash_to_block: dict[bytes, Block] = {}
        self.free_block_queue = Ends(self)
        self.free_block_queue.renew()

    def get_num_free_blocks(self) -> int:
        """As vLLM counts."""
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[Block]:
        """Take blocks from the front."""
        taken, self.free = self.free[:count], self.free[count:]
        self.touch(taken)
        return taken

    def touch(self, blocks: list[Block]) -> None:
        """Add a reference to each."""
        self.free = [block for block in self.free if block not in blocks]
        for block in blocks:
            block.ref_cnt += 1
        self.free_block_queue.renew()

    def free_blocks(self, blocks: list[Block]) -> None:
        """Take a reference from each."""
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                self.free.append(block)
        self.free_block_queue.renew()


class Request:
    """vllm.v1.request.Request."""

    def __init__(self, request_id: str) -> None:
        """A running one."""
        self.request_id = request_id
        self.status = Status.RUNNING
        self.num_prompt_tokens = 30
        self.num_output_tokens = 4
        self.num_preemptions = 0

    def is_finished(self) -> bool:
        """As vLLM decides."""
        return self.status.name.startswith("FINISHED_")


class FullAttentionManager:
    """A manager of one KV-cache group, whose n-th block holds the n-th tokens of a request."""

    block_size = 16

    def __init__(self, pool: Pool) -> None:
        """Without requests."""
        self.block_pool = pool
        self.req_to_blocks: dict[str, list[Block]] = {}


class Coordinator:
    """The managers of all groups."""

    def __init__(self, managers: list[FullAttentionManager]) -> None:
        """Of some groups."""
        self.single_type_managers = managers


class CacheManager:
    """vllm.v1.core.kv_cache_manager.KVCacheManager."""

    def __init__(self, blocks: int, groups: int) -> None:
        """One pool for all groups."""
        self.block_pool = Pool(blocks)
        self.coordinator = Coordinator([FullAttentionManager(self.block_pool) for _ in range(groups)])


class Scheduler:
    """vllm.v1.core.sched.scheduler.Scheduler."""

    def __init__(self, blocks: int = 1001, groups: int = 1) -> None:
        """Idle."""
        self.kv_cache_manager = CacheManager(blocks, groups)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.deferred_frees: list[tuple[int, list[Block]]] = []
        self.connector: Any = None

    @property
    def pool(self) -> Pool:
        """The pool of blocks."""
        return self.kv_cache_manager.block_pool

    def held(self, request_id: str, group: int = 0) -> list[Block]:
        """A request's blocks in one group."""
        return self.kv_cache_manager.coordinator.single_type_managers[group].req_to_blocks[request_id]

    def start(self, request_id: str, blocks: int = 10, shared: list[Block] | None = None, group: int = 0) -> Request:
        """Run a request that shares some blocks and takes others."""
        request = self.requests.setdefault(request_id, Request(request_id))
        if request not in self.running:
            self.running.append(request)
        self.pool.touch(shared or [])
        manager = self.kv_cache_manager.coordinator.single_type_managers[group]
        manager.req_to_blocks[request_id] = [*(shared or []), *self.pool.get_new_blocks(blocks)]
        return request

    def grow(self, request_id: str, blocks: int = 1, group: int = 0) -> None:
        """Give a running request more blocks."""
        self.held(request_id, group).extend(self.pool.get_new_blocks(blocks))

    def preempt(self, request_id: str) -> None:
        """Take all blocks from a request, which waits for others."""
        self.running.remove(self.requests[request_id])
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            self.pool.free_blocks(manager.req_to_blocks.pop(request_id, []))

    def end(self, request_id: str, status: Status = Status.FINISHED_STOPPED, lost: int = 0) -> None:
        """End a request whose last blocks keep a reference."""
        request = self.requests.pop(request_id)
        if request in self.running:
            self.running.remove(request)
        request.status = status
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            blocks = manager.req_to_blocks.pop(request_id, [])
            self.pool.free_blocks(blocks[: len(blocks) - lost])

    def step(self) -> None:
        """One step of the engine."""
        self.finished_req_ids = set()
