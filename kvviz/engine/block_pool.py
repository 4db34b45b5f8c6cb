"""Block ids: which are free, who holds them, which are kept for a prefix, and which a transfer has in its hands.

vLLM's words: a block pool hands out blocks; full blocks are known by a hash of everything up to their end, so that a
later request with the same prefix need not compute them; ``reset_prefix_cache`` forgets all of them.
"""

import hashlib
from collections.abc import Iterable, Sequence

from kvviz.audit.arguments import is_integer


class BlockError(ValueError):
    """A block was asked for, given back or moved when it could not be."""


def block_hashes(token_ids: Sequence[int], block_size: int) -> tuple[str, ...]:
    """A hash for each full block of a sequence, over its tokens and all before them.

    Raises:
        ValueError: a token id that is not an integer from 0 on, or blocks of less than one token.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    for number, token in enumerate(token_ids):
        if int(token) != token or token < 0:
            raise ValueError(f"token {number} is {token!r}: token ids are integers from 0 on")
    hashes, running = [], hashlib.sha256()
    for block in range(len(token_ids) // block_size):
        part = token_ids[block * block_size : (block + 1) * block_size]
        running.update(b"".join(int(token).to_bytes(8, "little") for token in part))
        hashes.append(running.hexdigest())
    return tuple(hashes)


class BlockPool:
    """The blocks of one cache.

    Args:
        num_blocks: block ids go from 0 to ``num_blocks - 1``.
        order: in which free blocks are handed out; default: ascending. A scattered order is as right as any.

    A block is free, held by one request, or kept for its prefix; beside that a transfer may have it in flight.

    Raises:
        BlockError: no blocks at all, or an order that does not name each of them once.
    """

    def __init__(self, num_blocks: int, order: Sequence[int] | None = None) -> None:
        if not is_integer(num_blocks, 1):
            raise BlockError(f"num_blocks must be an integer of at least 1, not {num_blocks!r}")
        self._free = list(range(num_blocks) if order is None else order)
        if sorted(self._free) != list(range(num_blocks)):
            raise BlockError(f"order must name each of the blocks 0 to {num_blocks - 1} once, not {self._free}")
        self.num_blocks = num_blocks
        self._holder: dict[int, str] = {}
        self._prefix: dict[str, int] = {}
        self.in_flight: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``allocate`` can give; those kept for a prefix only are given when nothing else is left."""
        return len(self._idle()) + len(self._only_kept())

    def held_by(self, request: str) -> tuple[int, ...]:
        """The blocks of a request, in the order in which it got them."""
        return tuple(block for block, holder in self._holder.items() if holder == request)

    def allocate(self, count: int, request: str) -> tuple[int, ...]:
        """Hand out ``count`` blocks to a request.

        Raises:
            BlockError: there are not enough, or ``count`` is no number of blocks; nothing has been handed out then.
        """
        if not is_integer(count):
            raise BlockError(f"request {request!r} asks for {count!r} blocks: ask for an integer of at least 0")
        if count > self.num_blocks:
            raise BlockError(
                f"request {request!r} needs {count} blocks and the cache has {self.num_blocks}: shorten the request or "
                f"allocate a larger cache"
            )
        if count > self.num_free_blocks:
            raise BlockError(
                f"request {request!r} needs {count} blocks and {self.num_free_blocks} of {self.num_blocks} are free: "
                f"finish or preempt a request first"
            )
        for block in self._only_kept()[: max(0, count - len(self._idle()))]:
            self.forget(block)
        blocks = tuple(self._idle()[:count])
        given = set(blocks)
        self._free = [block for block in self._free if block not in given]
        self._holder.update(dict.fromkeys(blocks, request))
        return blocks

    def hold(self, blocks: Iterable[int], request: str) -> None:
        """Give a request blocks that are kept for their prefix.

        Raises:
            BlockError: a block is held (two requests would write the same slots), in flight, or not kept; nothing
                has been given then.
        """
        blocks, kept = self.check(blocks), set(self._prefix.values())
        for block in blocks:
            if block in self._holder:
                raise BlockError(
                    f"block {block} is held by request {self._holder[block]!r}: request {request!r} would write the "
                    f"same slots"
                )
            if block in self.in_flight:
                raise BlockError(f"block {block} is in flight: wait for its transfer before request {request!r} has it")
            if block not in kept:
                raise BlockError(f"block {block} is not kept for a prefix: request {request!r} must allocate it")
        self._holder.update(dict.fromkeys(blocks, request))

    def free(self, blocks: Sequence[int], request: str) -> None:
        """Take blocks back; those with a known prefix stay kept for it.

        Raises:
            BlockError: a block is not this request's, given twice, or in flight; nothing has been taken back then.
        """
        blocks = self.check(blocks)
        for block in blocks:
            if block not in self._holder or self._holder[block] != request:
                whose = f"request {self._holder[block]!r}" if block in self._holder else "nobody"
                raise BlockError(f"request {request!r} frees block {block}, which {whose} holds")
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
        """Know full blocks by their hashes from now on; a hash that is known already keeps its block.

        A free block is free no longer then, but kept.

        Raises:
            BlockError: hashes and blocks differ in number, or a block is none of the pool's, given twice, or known by
                another hash, since it has one content; nothing new is known then.
        """
        blocks = self.check(blocks)
        if len(hashes) != len(blocks):
            raise BlockError(f"{len(hashes)} hashes cannot name {len(blocks)} blocks: give one hash a block")
        self.check_names(hashes, blocks)
        for key, block in zip(hashes, blocks, strict=True):
            if self._prefix.setdefault(key, block) == block and block in self._free:
                self._free.remove(block)

    def cached(self, hashes: Sequence[str]) -> tuple[int, ...]:
        """Blocks of the longest prefix that is known and that nobody holds or moves now."""
        idle, found = set(self._only_kept()), []
        for key in hashes:
            if self._prefix.get(key) not in idle:
                break
            found.append(self._prefix[key])
        return tuple(found)

    def reset_prefix_cache(self) -> None:
        """Forget every prefix; blocks that nobody holds become free.

        Raises:
            BlockError: a block is in flight; it could be known again as soon as it has arrived.
        """
        if self.in_flight:
            raise BlockError(f"blocks {sorted(self.in_flight)} are in flight: wait for their transfer before the reset")
        idle = self._only_kept()
        self._prefix.clear()
        self._free += idle

    def forget(self, block: int) -> None:
        """Know a block by no hash any more; it becomes free if nobody holds it."""
        if block in self._prefix.values():
            self._prefix = {key: kept for key, kept in self._prefix.items() if kept != block}
            if block not in self._holder:
                self._free.append(block)

    def check(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """The blocks as a tuple. Raises BlockError if one is none of the pool's, or is given twice."""
        blocks, seen = tuple(blocks), set()
        for block in blocks:
            if not is_integer(block) or block >= self.num_blocks:
                raise BlockError(f"block {block!r} is none of the pool's 0 to {self.num_blocks - 1}")
            if block in seen:
                raise BlockError(f"block {block} is given twice: name each block once")
            seen.add(block)
        return blocks

    def check_names(self, hashes: Sequence[str], blocks: Sequence[int]) -> None:
        """Raise BlockError if a block is known by another hash than the one beside it."""
        names = {block: key for key, block in self._prefix.items()}
        for key, block in zip(hashes, blocks, strict=True):
            if names.get(block, key) != key:
                raise BlockError(
                    f"block {block} is kept for the prefix {names[block][:12]}... and cannot hold {key[:12]}... too: "
                    f"take another block"
                )

    def _only_kept(self) -> list[int]:
        return [block for block in self._prefix.values() if block not in self._holder and block not in self.in_flight]

    def _idle(self) -> list[int]:
        return [block for block in self._free if block not in self.in_flight]
