"""Several requests over one cache: blocks from one pool, tokens in turn, prefixes and offloaded blocks used again."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvviz.cache.buffers import KVCache, ScaleViews
from kvviz.engine.block_pool import BlockPool, block_hashes
from kvviz.engine.generate import Generation, PagedBackend, tokens
from kvviz.engine.model import LanguageModel
from kvviz.engine.offload import Offloader, TransferError, check_pool


@dataclass(frozen=True)
class Request:
    """A prompt (token ids) to be answered with at most ``max_new_tokens``."""

    name: str
    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Served:
    """An answer, and how many tokens of its prompt were found in the prefix cache and in host memory."""

    generation: Generation
    num_cached_tokens: int
    num_restored_tokens: int
    blocks: tuple[int, ...]


@dataclass
class Engine:
    """What serves requests: a model, its cache, the scale views of every layer, a block pool, maybe an offloader.

    Args:
        chunk: prefill this many tokens a forward pass; default all that are left. With the block size, a prompt whose
            first blocks were found goes through passes of the same sizes as one that is computed from its beginning,
            so that both give the same logits to the bit.

    Raises:
        ValueError: a pool of another size than the cache, or an offloader of another cache or pool.
    """

    model: LanguageModel
    cache: KVCache
    scales: ScaleViews | None
    pool: BlockPool
    offloader: Offloader | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_pool(self.cache, self.pool)
        if self.offloader is not None and (
            self.offloader.cache is not self.cache or self.offloader.pool is not self.pool
        ):
            raise ValueError(
                "the offloader was built for another cache or another pool: build it with those of this engine"
            )

    def serve(self, requests: Sequence[Request]) -> dict[str, Served]:
        """Answer requests, a token of each in turn, and leave their blocks free or kept for their prefix.

        Full blocks of prompt and answer are kept in the prefix cache and, with an offloader, stored in host memory.

        Whatever ends this early (an interrupt too) leaves the requests' blocks free, or kept if they were whole.

        Raises:
            BlockError: the cache has not enough blocks for all of them at once, or host memory has no room left.
            ValueError: a request asks for nothing, two have one name, or a name holds blocks already.
            TransferError: a block did not arrive.
        """
        self._check(requests)
        try:
            started = [self._start(request) for request in requests]
            running = list(started)
            while running:
                running = [one for one in running if one.step()]
            return {one.request.name: self._finish(one) for one in started}
        except BaseException:
            self._give_back(requests)
            raise

    def _check(self, requests: Sequence[Request]) -> None:
        names = [request.name for request in requests]
        for request in requests:
            name, size, count = request.name, len(request.prompt), request.max_new_tokens
            if not size or count < 1:
                raise ValueError(
                    f"request {name!r} has nothing to do: a prompt of {size} tokens and {count} new tokens; both must "
                    f"be at least 1"
                )
            if names.count(name) > 1:
                raise ValueError(f"{names.count(name)} requests have the name {name!r}: give each its own")
            if self.pool.held_by(name):
                raise ValueError(
                    f"request {name!r} holds blocks {list(self.pool.held_by(name))} already: free them, or take "
                    f"another name"
                )
            block_hashes(request.prompt, self.cache.spec.block_size)  # says what is no token id

    def _give_back(self, requests: Sequence[Request]) -> None:
        if self.offloader is not None:
            with contextlib.suppress(TransferError):  # what failed is on its way to the caller
                self.offloader.wait_all()
        for request in requests:
            self.pool.free(self.pool.held_by(request.name), request.name)

    def _start(self, request: Request) -> "_Running":
        spec = self.cache.spec
        needed = -(-(len(request.prompt) + request.max_new_tokens) // spec.block_size)
        reusable = block_hashes(request.prompt[:-1], spec.block_size)  # the last token's logits are always computed
        found = self.pool.cached(reusable)  # those that nobody writes or reads now
        self.pool.hold(found, request.name)
        fresh = self.pool.allocate(needed - len(found), request.name)
        stored = self._stored(reusable[len(found) :])
        if stored:
            self.offloader.restore(stored, fresh[: len(stored)]).wait()
        computed = (len(found) + len(stored)) * spec.block_size
        backend = PagedBackend(self.cache, self.scales, (*found, *fresh))
        prompt, count = list(request.prompt), request.max_new_tokens
        steps = tokens(self.model, backend, prompt, count, chunk=self.chunk, num_computed_tokens=computed)
        counts = (len(found) * spec.block_size, len(stored) * spec.block_size)
        return _Running(request, backend.blocks, steps, counts)

    def _stored(self, hashes: Sequence[str]) -> list[str]:
        """The longest run of hashes from the first one on that host memory holds."""
        found = []
        for key in hashes:
            if self.offloader is None or key not in self.offloader.stored:
                break
            found.append(key)
        return found

    def _finish(self, one: "_Running") -> Served:
        written = [*one.request.prompt, *one.answer[:-1]]  # the last token was never fed back
        hashes = block_hashes(written, self.cache.spec.block_size)
        full = one.blocks[: len(hashes)]
        self.pool.keep(hashes, full)
        if self.offloader is not None:
            self.offloader.store(hashes, full).wait()
        self.pool.free(one.blocks, one.request.name)
        generation = Generation(tuple(one.answer), self.model.decode(one.answer), tuple(one.margins))
        return Served(generation, *one.counts, one.blocks)


class _Running:
    """A request between two of its tokens."""

    def __init__(self, request: Request, blocks: tuple[int, ...], steps, counts: tuple[int, int]) -> None:
        self.request, self.blocks, self.counts, self._steps = request, blocks, counts, steps
        self.answer: list[int] = []
        self.margins: list[float] = []

    def step(self) -> bool:
        """Generate one more token; False when there is none."""
        token, margin = next(self._steps, (None, None))
        if token is None:
            return False
        self.answer.append(token)
        self.margins.append(margin)
        return True
