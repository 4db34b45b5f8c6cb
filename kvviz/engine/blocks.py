"""Block ids: which are free, who holds them, which are kept for a prefix, and which a transfer has in its hands.

vLLM's words: a block pool hands out blocks; full blocks are known by a hash of everything up to their end, so that a
later request with the same prefix need not compute them; ``reset_prefix_cache`` forgets all of them.
"""

import hashlib
from collections.abc import Iterable, Sequence


class BlockError(ValueError):
    """A block was asked for, given back or moved when it could not be."""


def block_hashes(token_ids: Sequence[int], block_size: int) -> tuple[str, ...]:
    """A hash for each full block of a sequence, over its tokens and all before them."""
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
    """

    def __init__(self, num_blocks: int, order: Sequence[int] | None = None) -> None:
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
        return len(self._free) + len(self._only_kept())

    def allocate(self, count: int, request: str) -> tuple[int, ...]:
        """Hand out ``count`` blocks to a request.

        Raises:
            BlockError: there are not enough; nothing has been handed out then.
        """
        if count > self.num_free_blocks:
            raise BlockError(
                f"request {request!r} needs {count} blocks and {self.num_free_blocks} of {self.num_blocks} are free: "
                f"finish or preempt a request first"
            )
        for block in self._only_kept()[: max(0, count - len(self._free))]:
            self._forget(block)
            self._free.append(block)
        blocks, self._free = tuple(self._free[:count]), self._free[count:]
        self._holder.update(dict.fromkeys(blocks, request))
        return blocks

    def hold(self, blocks: Iterable[int], request: str) -> None:
        """Give a request blocks that are kept for their prefix.

        Raises:
            BlockError: another request holds one of them: two requests would write the same slots.
        """
        for block in blocks:
            if block in self._holder:
                raise BlockError(
                    f"block {block} is held by request {self._holder[block]!r}: request {request!r} would write the "
                    f"same slots"
                )
        self._holder.update(dict.fromkeys(blocks, request))

    def free(self, blocks: Sequence[int], request: str) -> None:
        """Take blocks back; those with a known prefix stay kept for it.

        Raises:
            BlockError: a block is not this request's, or in flight; nothing has been taken back then.
        """
        for block in blocks:
            if self._holder.get(block) != request:
                holder = self._holder.get(block)
                whose = f"request {holder!r}" if holder else "nobody"
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
        """Know full blocks by their hashes from now on; a hash that is known already keeps its block."""
        for key, block in zip(hashes, blocks, strict=True):
            self._prefix.setdefault(key, block)

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
            BlockError: a kept block is in flight.
        """
        busy = (self.in_flight & set(self._prefix.values())) - set(self._holder)
        if busy:
            raise BlockError(f"blocks {sorted(busy)} are in flight: wait for their transfer before the reset")
        idle = self._only_kept()
        self._prefix.clear()
        self._free += idle

    def _only_kept(self) -> list[int]:
        return [block for block in self._prefix.values() if block not in self._holder and block not in self.in_flight]

    def _forget(self, block: int) -> None:
        self._prefix = {key: kept for key, kept in self._prefix.items() if kept != block}
