"""Manages the block ids of one cache, as vLLM's block pool does.

The pool hands out free blocks to requests. If a block is full, the pool can *keep* this block after the request ends.
The pool then stores a hash of all tokens from the start of the sequence to the end of the block. A later request with
the same prefix finds the block by this hash, and does not compute these tokens again. ``reset_prefix_cache`` forgets
all hashes.
"""

import hashlib
from collections.abc import Iterable, Sequence

from kvviz.audit.arguments import is_integer
from kvviz.audit.findings import counted


class BlockError(ValueError):
    """The pool or the offloader cannot do this with a block. The message names the block and the reason."""


def block_hashes(token_ids: Sequence[int], block_size: int) -> tuple[str, ...]:
    """Return one hash per full block of a sequence.

    A hash is computed from the tokens of the block and all earlier tokens of the sequence.

    Raises:
        ValueError: a token id is not an integer of at least 0, or ``block_size`` is less than 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, but it must be at least 1")
    for number, token in enumerate(token_ids):
        if not is_integer(token):
            raise ValueError(f"token {number} is {token!r}, but a token id must be an integer of at least 0")
    hashes, running = [], hashlib.sha256()
    for block in range(len(token_ids) // block_size):
        part = token_ids[block * block_size : (block + 1) * block_size]
        running.update(b"".join(int(token).to_bytes(8, "little") for token in part))
        hashes.append(running.hexdigest())
    return tuple(hashes)


class BlockPool:
    """The block ids of one cache.

    A block is free, held by one request, or kept for a prefix. A held block can also be kept. Then it stays kept when
    the request ends. A block is *in flight* while a transfer reads or writes the block.

    Args:
        num_blocks: number of blocks. The ids are 0 to ``num_blocks - 1``.
        order: the block ids in the order in which free blocks are handed out. Default: ascending. Every order gives
            correct results.

    Raises:
        BlockError: ``num_blocks`` is less than 1, or ``order`` does not name each block once.
    """

    def __init__(self, num_blocks: int, order: Sequence[int] | None = None) -> None:
        if not is_integer(num_blocks, 1):
            raise BlockError(f"num_blocks must be an integer of at least 1, not {num_blocks!r}")
        num_blocks = int(num_blocks)
        self._free = list(range(num_blocks)) if order is None else [_integer(block) for block in order]
        if sorted(self._free) != list(range(num_blocks)):
            raise BlockError(f"order must name each of the blocks 0 to {num_blocks - 1} once, but is {self._free}")
        self.num_blocks = num_blocks
        self._holder: dict[int, str] = {}
        self._prefix: dict[str, int] = {}
        self.in_flight: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        """Return how many blocks ``allocate`` can hand out. Blocks that are kept, but not held, are counted too."""
        return len(self._idle()) + len(self._only_kept())

    def held_by(self, request: str) -> tuple[int, ...]:
        """Return the blocks of a request, in the order in which the request got them."""
        return tuple(block for block, holder in self._holder.items() if holder == request)

    def allocate(self, count: int, request: str) -> tuple[int, ...]:
        """Hand out ``count`` blocks to a request. Blocks that are kept for a prefix are used last.

        Raises:
            BlockError: there are not enough blocks, or ``count`` is not an integer of at least 0. The request then
                gets no block.
        """
        if not is_integer(count):
            raise BlockError(
                f"request {request!r} asks for {count!r} blocks, but this number must be an integer of at least 0"
            )
        if count > self.num_blocks:
            raise BlockError(
                f"request {request!r} needs {counted(count, 'block')}, but the cache has only {self.num_blocks}: "
                "shorten the request, or allocate a larger cache"
            )
        if count > self.num_free_blocks:
            raise BlockError(
                f"request {request!r} needs {counted(count, 'block')}, but only {self.num_free_blocks} of "
                f"{self.num_blocks} blocks are free: wait until another request has ended"
            )
        for block in self._only_kept()[: max(0, count - len(self._idle()))]:
            self.forget(block)
        blocks = tuple(self._idle()[:count])
        given = set(blocks)
        self._free = [block for block in self._free if block not in given]
        self._holder.update(dict.fromkeys(blocks, request))
        return blocks

    def hold(self, blocks: Iterable[int], request: str) -> None:
        """Assign kept blocks to a request.

        Raises:
            BlockError: a block is held by a request, is in flight, or is not kept. The request then gets no block.
        """
        blocks, kept = self.check(blocks), set(self._prefix.values())
        for block in blocks:
            if block in self._holder:
                raise BlockError(
                    f"block {block} is held by request {self._holder[block]!r}, so request {request!r} cannot use it: "
                    f"two requests would write to the same slots. Wait until request {self._holder[block]!r} has ended."
                )
            if block in self.in_flight:
                raise BlockError(
                    f"block {block} is in flight: wait for its transfer before request {request!r} uses it"
                )
            if block not in kept:
                raise BlockError(
                    f"block {block} is not kept for a prefix, so request {request!r} cannot hold it: call allocate()"
                )
        self._holder.update(dict.fromkeys(blocks, request))

    def free(self, blocks: Sequence[int], request: str) -> None:
        """Take blocks back from a request. A block that is kept stays kept. Every other block becomes free.

        Raises:
            BlockError: the request does not hold one of the blocks, or a block is named twice, or a block is in flight.
                The request then keeps all blocks.
        """
        blocks = self.check(blocks)
        for block in blocks:
            if block not in self._holder or self._holder[block] != request:
                whose = f"request {self._holder[block]!r}" if block in self._holder else "nobody"
                raise BlockError(
                    f"request {request!r} cannot free block {block}, because {whose} holds this block: name only "
                    f"blocks of held_by({request!r})"
                )
            if block in self.in_flight:
                raise BlockError(
                    f"block {block} is in flight: wait for its transfer before request {request!r} frees it"
                )
        kept = set(self._prefix.values())
        for block in blocks:
            del self._holder[block]
            if block not in kept:
                self._free.append(block)

    def keep(self, hashes: Sequence[str], blocks: Sequence[int]) -> None:
        """Store the hashes of full blocks, so that ``cached`` finds the blocks. A free block becomes a kept block.

        If a hash is stored for another block already, the new block is not kept.

        Raises:
            BlockError: the numbers of hashes and blocks differ. Or a block does not exist, or is named twice. Or
                another hash is stored for a block. No hash is then stored.
        """
        blocks = self.check(blocks)
        if len(hashes) != len(blocks):
            raise BlockError(
                f"there are {len(hashes)} hashes for {counted(len(blocks), 'block')}: give one hash per block"
            )
        self.check_names(hashes, blocks)
        for key, block in zip(hashes, blocks, strict=True):
            if self._prefix.setdefault(key, block) == block and block in self._free:
                self._free.remove(block)

    def cached(self, hashes: Sequence[str]) -> tuple[int, ...]:
        """Return the blocks of the longest prefix that is kept. Only blocks that a request can hold now are returned.

        The prefix ends at the first block that is not kept, or is held, or is in flight.
        """
        idle, found = set(self._only_kept()), []
        for key in hashes:
            if self._prefix.get(key) not in idle:
                break
            found.append(self._prefix[key])
        return tuple(found)

    def reset_prefix_cache(self) -> None:
        """Forget all hashes. Blocks that no request holds become free.

        Raises:
            BlockError: a block is in flight. At the end of the transfer, the hash of the block would be stored again.
        """
        if self.in_flight:
            raise BlockError(
                f"blocks {sorted(self.in_flight)} are in flight: wait for their transfers before resetting the cache"
            )
        idle = self._only_kept()
        self._prefix.clear()
        self._free += idle

    def forget(self, block: int) -> None:
        """Forget the hash of a block. If no request holds the block, it becomes free."""
        if block in self._prefix.values():
            self._prefix = {key: kept for key, kept in self._prefix.items() if kept != block}
            if block not in self._holder:
                self._free.append(block)

    def check(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Return the blocks as a tuple of Python integers.

        Raises:
            BlockError: a block does not exist, or is named twice.
        """
        blocks, seen = tuple(map(_integer, blocks)), set()
        for block in blocks:
            if not is_integer(block) or block >= self.num_blocks:
                raise BlockError(f"block {block!r} does not exist: the cache has the blocks 0 to {self.num_blocks - 1}")
            if block in seen:
                raise BlockError(f"block {block} is named twice: name each block once")
            seen.add(block)
        return blocks

    def check_names(self, hashes: Sequence[str], blocks: Sequence[int]) -> None:
        """Raise BlockError if another hash is stored for a block. ``hashes[i]`` is the hash of ``blocks[i]``."""
        names = {block: key for key, block in self._prefix.items()}
        for key, block in zip(hashes, blocks, strict=True):
            if names.get(block, key) != key:
                raise BlockError(
                    f"block {block} is kept for the prefix with hash {names[block][:12]}..., so it cannot be kept for "
                    f"{key[:12]}... too: use another block"
                )

    def _only_kept(self) -> list[int]:
        """Return the kept blocks that are not held and not in flight."""
        return [block for block in self._prefix.values() if block not in self._holder and block not in self.in_flight]

    def _idle(self) -> list[int]:
        """Return the free blocks that are not in flight, in the order in which they are handed out."""
        return [block for block in self._free if block not in self.in_flight]


def _integer(block: object) -> object:
    """Convert an integer, for example of numpy, to a Python integer. Return every other value unchanged."""
    return int(block) if is_integer(block) else block
