"""Serves several requests with one cache. The engine generates one token of each request, then the next token of each.

All requests get blocks from one pool. A request reuses blocks with the same prefix, if the cache or host memory has
such blocks.
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
    """One question to the engine.

    Attributes:
        name: the name of the request.
        prompt: the token ids of the prompt.
        max_new_tokens: the most tokens of the answer.
    """

    name: str
    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Served:
    """An answer of the engine.

    Args:
        generation: the generated answer.
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
        model: the language model.
        cache: the cache of the model.
        scales: the scale views of every layer. None in a mode without scales.
        pool: the block pool of the cache.
        offloader: the object that stores full blocks in host memory. If it is None, nothing is offloaded.
        chunk: number of tokens of the prompt per forward pass. Default: all tokens that are not reused. If ``chunk``
            is the block size, a reused prefix does not change the sizes of the other forward passes. The logits then
            have the same bits with and without reuse.

    Raises:
        ValueError: the pool and the cache have different numbers of blocks. Or the offloader was made with another
            cache or another pool.
    """

    model: LanguageModel
    cache: KVCache
    scales: ScaleViews | None
    pool: BlockPool
    offloader: Offloader | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_pool(self.cache, self.pool)
        for name in ("cache", "pool"):
            if self.offloader is not None and getattr(self.offloader, name) is not getattr(self, name):
                raise ValueError(
                    f"the offloader has another {name} than this engine: make the offloader with the {name} of this "
                    "engine"
                )

    def serve(self, requests: Sequence[Request]) -> dict[str, Served]:
        """Answer all requests. Return a dict with the answer for the name of each request.

        Full blocks of prompt and answer stay in the prefix cache. If there is an offloader, these blocks are also
        stored in host memory. All other blocks become free. After an error or an interrupt (Ctrl-C), no request holds
        blocks.

        Raises:
            BlockError: the cache has too few blocks for all requests together. Or host memory is full.
            ValueError: a prompt is empty, or a token is not in the vocabulary. Or ``max_new_tokens`` is less than 1. Or
                two requests have the same name. Or a request with this name holds blocks already.
            TransferError: a block could not be copied to host memory or back.
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
            if not size:
                raise ValueError(f"request {name!r} has a prompt of 0 tokens: pass at least one token")
            if count < 1:
                raise ValueError(f"request {name!r} has max_new_tokens {count}, but it must be at least 1")
            if names.count(name) > 1:
                raise ValueError(f"{names.count(name)} requests have the name {name!r}: give each request another name")
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
            with contextlib.suppress(TransferError):  # serve() raises the first error anyway
                self.offloader.wait_all()
        for request in requests:
            self.pool.free(self.pool.held_by(request.name), request.name)

    def _start(self, request: Request) -> "_Running":
        spec = self.cache.spec
        needed = -(-(len(request.prompt) + request.max_new_tokens) // spec.block_size)
        # The last token of the prompt is always computed, because its logits give the first new token.
        reusable = block_hashes(request.prompt[:-1], spec.block_size)
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
        """Return the hashes before the first hash that is not in host memory."""
        found = []
        for key in hashes:
            if self.offloader is None or key not in self.offloader.stored:
                break
            found.append(key)
        return found

    def _finish(self, one: "_Running") -> Served:
        # The last token of the answer is not in the cache, because no forward pass has read this token.
        written = [*one.request.prompt, *one.answer[:-1]]
        hashes = block_hashes(written, self.cache.spec.block_size)
        full = one.blocks[: len(hashes)]
        self.pool.keep(hashes, full)
        if self.offloader is not None:
            self.offloader.store(hashes, full).wait()
        self.pool.free(one.blocks, one.request.name)
        texts = tuple(self.model.decode([token]) for token in one.answer)
        generation = Generation(tuple(one.answer), self.model.decode(one.answer), tuple(one.margins), texts)
        return Served(generation, *one.counts, one.blocks)


class _Running:
    """A request whose answer is not complete."""

    def __init__(self, request: Request, blocks: tuple[int, ...], steps, counts: tuple[int, int]) -> None:
        self.request, self.blocks, self.counts, self._steps = request, blocks, counts, steps
        self.answer: list[int] = []
        self.margins: list[float] = []

    def step(self) -> bool:
        """Generate one token. If the answer is complete already, return False."""
        token, margin = next(self._steps, (None, None))
        if token is None:
            return False
        self.answer.append(token)
        self.margins.append(margin)
        return True
