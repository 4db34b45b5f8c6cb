"""Serves several requests over one cache. The requests take turns: each turn generates one token.

All requests take their blocks from one pool. A request reuses blocks of its prefix from the cache and from host memory.
"""

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
    """A prompt (token ids) and the largest number of tokens in the answer."""

    name: str
    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Served:
    """An answer.

    Args:
        num_cached_tokens: number of tokens of the prompt that were found in the prefix cache.
        num_restored_tokens: number of tokens of the prompt that were restored from host memory.
        blocks: the blocks of the request.
    """

    generation: Generation
    num_cached_tokens: int
    num_restored_tokens: int
    blocks: tuple[int, ...]


@dataclass
class Engine:
    """Serves requests with a model and a cache.

    Args:
        scales: the scale views of every layer, or None for a mode without scales.
        pool: the block pool of the cache.
        offloader: stores full blocks in host memory. None: no offloading.
        chunk: number of tokens to prefill per forward pass. Default: the whole rest of the prompt. If ``chunk`` is the
            block size, a prompt with a reused prefix has forward passes of the same sizes as a prompt without. Then
            the logits are equal to the bit.

    Raises:
        ValueError: the pool has another number of blocks than the cache, or the offloader has another cache or pool.
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
                "the offloader has another cache or another pool: build it with the cache and pool of this engine"
            )

    def serve(self, requests: Sequence[Request]) -> dict[str, Served]:
        """Answer all requests and return the answers by name.

        Full blocks of prompt and answer stay in the prefix cache. With an offloader, they are also stored in host
        memory. All other blocks become free. An error or an interrupt (Ctrl-C) frees the blocks of all requests too.

        Raises:
            BlockError: the cache has too few blocks for all requests together, or host memory is full.
            ValueError: a prompt is empty, a token is outside the vocabulary, no new token is requested, two requests
                have one name, or the name of a request holds blocks already.
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
            self._free_all(requests)
            raise

    def _check(self, requests: Sequence[Request]) -> None:
        names = [request.name for request in requests]
        for request in requests:
            name, size, count = request.name, len(request.prompt), request.max_new_tokens
            if not size or count < 1:
                raise ValueError(
                    f"request {name!r} has a prompt of {size} tokens and asks for {count} new tokens: both must be at "
                    f"least 1"
                )
            if names.count(name) > 1:
                raise ValueError(f"{names.count(name)} requests have the name {name!r}: give each request its own name")
            if self.pool.held_by(name):
                raise ValueError(
                    f"request {name!r} holds blocks {list(self.pool.held_by(name))} already: free these blocks, or use "
                    f"another name"
                )
            try:
                self.model.check_tokens(request.prompt)
            except ValueError as error:
                raise ValueError(f"request {name!r}: {error}") from error

    def _free_all(self, requests: Sequence[Request]) -> None:
        if self.offloader is not None:
            with contextlib.suppress(TransferError):  # the caller gets the first error anyway
                self.offloader.wait_all()
        for request in requests:
            self.pool.free(self.pool.held_by(request.name), request.name)

    def _start(self, request: Request) -> "_Running":
        spec = self.cache.spec
        needed = -(-(len(request.prompt) + request.max_new_tokens) // spec.block_size)
        reusable = block_hashes(request.prompt[:-1], spec.block_size)  # the last token's logits are always computed
        found = self.pool.cached(reusable)
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
        """Return the hashes up to the first one that is not in host memory."""
        found = []
        for key in hashes:
            if self.offloader is None or key not in self.offloader.stored:
                break
            found.append(key)
        return found

    def _finish(self, one: "_Running") -> Served:
        written = [
            *one.request.prompt,
            *one.answer[:-1],
        ]  # the last token is not in the cache, because no forward pass has read it
        hashes = block_hashes(written, self.cache.spec.block_size)
        full = one.blocks[: len(hashes)]
        self.pool.keep(hashes, full)
        if self.offloader is not None:
            self.offloader.store(hashes, full).wait()
        self.pool.free(one.blocks, one.request.name)
        generation = Generation(tuple(one.answer), self.model.decode(one.answer), tuple(one.margins))
        return Served(generation, *one.counts, one.blocks)


class _Running:
    """A request that is being answered."""

    def __init__(self, request: Request, blocks: tuple[int, ...], steps, counts: tuple[int, int]) -> None:
        self.request, self.blocks, self.counts, self._steps = request, blocks, counts, steps
        self.answer: list[int] = []
        self.margins: list[float] = []

    def step(self) -> bool:
        """Generate one token. Return False if the answer is complete."""
        token, margin = next(self._steps, (None, None))
        if token is None:
            return False
        self.answer.append(token)
        self.margins.append(margin)
        return True
