"""Copies blocks of the cache to host memory and back, as an offloading connector does.

The layout decides what a copy costs. A block of a cross-layer buffer is one piece. A block of per-layer buffers has at
least one piece per layer. Copies run in a thread. Until a copy has ended, its blocks are *in flight*, and no request
may use these blocks. If a copy fails, the prefix cache does not contain the blocks of this copy.

The *width* is the number of bytes of each page that are copied. In the per-layer path of vLLM, the width was
``real_page_size_bytes`` for some time. This number does not count the scales. The correct width is
``content_page_size_bytes`` (PR 48411).
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from kvviz.audit.arguments import is_integer
from kvviz.audit.findings import counted
from kvviz.cache.buffers import KVCache, block_runs, check_fits
from kvviz.engine.block_pool import BlockError, BlockPool
from kvviz.kernels.gather import BlockGatherer


class TransferError(RuntimeError):
    """A transfer failed before all blocks were copied. The message names the blocks without valid content."""


class Piece(NamedTuple):
    """The bytes ``[start, stop)`` of one storage, which one copy moves.

    ``at`` is the byte of the block in host memory at which these bytes start.
    """

    storage: int
    start: int
    stop: int
    at: int


class Transfer:
    """A transfer that has begun. Call :meth:`wait` to learn if it succeeds.

    Args:
        keys: the hashes of the blocks.
        blocks: the blocks that the transfer moves.
        to_host: True for a copy to host memory, False for a copy back.
        work: the copy that runs in a thread.
        finish: a function. Each call of ``wait`` calls ``finish(transfer, arrived)`` when the copy has ended.
            ``arrived`` is True if the copy succeeded.
    """

    def __init__(
        self,
        keys: Sequence[str],
        blocks: Sequence[int],
        to_host: bool,
        work: Future,
        finish: Callable[["Transfer", bool], None],
    ) -> None:
        self.keys, self.blocks, self.to_host = tuple(keys), tuple(blocks), to_host
        self._work, self._finish = work, finish

    def wait(self) -> None:
        """Wait until all blocks are copied. After an interrupt (Ctrl-C), you can call this method again.

        Raises:
            TransferError: a block could not be copied. Every later call raises this error too. If a copy to host memory
                fails, host memory stores no block of this transfer. If a copy back fails, the prefix cache contains no
                block of this transfer. Blocks that were stored earlier stay stored.
        """
        error = self._work.exception()
        self._finish(self, error is None)
        if error is not None:
            where = "to host memory" if self.to_host else "back from host memory"
            raise TransferError(
                f"the transfer of blocks {list(self.blocks)} {where} failed midway ({error}), so the content of these "
                "blocks is not valid: repeat the transfer, or compute the tokens of these blocks again"
            ) from error


def check_pool(cache: KVCache, pool: BlockPool) -> None:
    """Raise ValueError if the pool and the cache have different numbers of blocks."""
    if pool.num_blocks != cache.spec.num_blocks:
        raise ValueError(
            f"the pool has {counted(pool.num_blocks, 'block')}, but the cache has {cache.spec.num_blocks}: "
            f"make the pool with BlockPool({cache.spec.num_blocks})"
        )


class Offloader:
    """Moves blocks between a cache and host memory. Each transfer moves the pages of all layers.

    If the cache is on a GPU, the host memory is pinned.

    Args:
        cache: the cache.
        pool: the block pool of the cache. The offloader tells the pool which blocks are in flight, and which restored
            blocks are kept.
        num_host_blocks: number of blocks that host memory can store.
        width_bytes: number of bytes that are copied from the start of each page. Default: the content of the page.
        check_width: True to refuse a width that is smaller than the content of a page. A notebook uses False to show
            what a small width does.
        gathered: number of blocks that are first gathered in a staging buffer on the device, and then moved in one
            piece. If it is 0, each piece is moved alone, as a connector without its own kernel does.

    Raises:
        ValueError: the pool and the cache have different numbers of blocks, or an argument is not an integer of at
            least 0. Or the width is larger than the page, or smaller than the content. Or a page has several pieces,
            and the width is not the size of the content.
        MemoryError: there is not enough host memory.
    """

    def __init__(
        self,
        cache: KVCache,
        pool: BlockPool,
        num_host_blocks: int,
        *,
        width_bytes: int | None = None,
        check_width: bool = True,
        gathered: int = 0,
    ) -> None:
        check_pool(cache, pool)
        numbers = {"num_host_blocks": num_host_blocks, "width_bytes": width_bytes, "gathered": gathered}
        for name, value in numbers.items():
            if value is not None and not is_integer(value):
                raise ValueError(f"{name} is {value!r}, but it must be an integer of at least 0")
        self.cache, self.pool = cache, pool
        self.width_bytes = cache.spec.content_page_size_bytes if width_bytes is None else int(width_bytes)
        self._check_width(check_width)
        self._runs = [block_runs(kv) for kv in cache.kv_caches]
        self.pieces_of = [self._pieces(block) for block in range(cache.spec.num_blocks)]
        self.block_bytes = sum(piece.stop - piece.start for piece in self.pieces_of[0])
        check_fits(int(num_host_blocks) * self.block_bytes, "cpu")
        on_gpu = cache.storages[0].is_cuda
        self.host = torch.zeros(int(num_host_blocks), self.block_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._stage = torch.empty(int(gathered), self.block_bytes, dtype=torch.uint8, device=cache.storages[0].device)
        if gathered:
            self._gatherer = BlockGatherer(cache.storages, self.pieces_of, self.block_bytes)
        self._stream = torch.cuda.Stream(cache.storages[0].device) if on_gpu else None
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(num_host_blocks))
        self._transfers: list[Transfer] = []
        self._executor = ThreadPoolExecutor(1)

    @property
    def stored(self) -> frozenset[str]:
        """Return the hashes of the blocks in host memory. Blocks that are still being copied are left out."""
        return frozenset(self._slots) - self._moving(True)

    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> Transfer:
        """Begin to copy blocks to host memory. If a hash is stored already, the block is not copied again.

        Args:
            keys: one hash per block.
            blocks: the blocks.

        Raises:
            BlockError: host memory is full. Or a block does not exist, is in flight, or is named twice. Or a hash is in
                flight, or is named twice. Nothing is then copied.
        """
        blocks = self._check(keys, blocks)
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise BlockError(f"the hash {twice[:12]}... is named twice: name each hash once")
        self._check_arrived(keys)
        new = {key: block for key, block in zip(keys, blocks, strict=True) if key not in self._slots}
        if len(new) > len(self._free_slots):
            raise BlockError(
                f"{counted(len(new), 'block')} must be stored, but only {len(self._free_slots)} of the "
                f"{len(self.host)} blocks of host memory are free: drop stored blocks, or make the offloader with a "
                "larger num_host_blocks"
            )
        self._check_idle(new.values())
        for key in new:
            self._slots[key] = self._free_slots.pop(0)
        return self._begin(list(new), list(new.values()), to_host=True)

    def restore(self, keys: Sequence[str], blocks: Sequence[int]) -> Transfer:
        """Begin to copy blocks from host memory into the cache. When the transfer has ended, the pool keeps them.

        Args:
            keys: the hashes of stored blocks.
            blocks: for each hash, the block of the cache to write. It must be held by the caller, or be free.

        Raises:
            BlockError: a hash was never stored, or is still being copied to host memory. Or a block does not exist, is
                in flight, is named twice, or is kept for another prefix. Nothing is then copied.
        """
        blocks = self._check(keys, blocks)
        self._check_arrived(keys)
        for key in keys:
            if key not in self._slots:
                raise BlockError(f"the block with hash {key[:12]}... was never stored: compute its tokens instead")
        self.pool.check_names(keys, blocks)
        self._check_idle(blocks)
        return self._begin(keys, blocks, to_host=False)

    def drop(self, keys: Sequence[str]) -> None:
        """Forget stored blocks, so that host memory can store other blocks.

        Raises:
            BlockError: a hash was never stored, is named twice, or is in flight. Nothing is then forgotten.
        """
        moving, seen = self._moving(True) | self._moving(False), set()
        for key in keys:
            if key not in self._slots:
                raise BlockError(f"the block with hash {key[:12]}... was never stored: name only stored hashes")
            if key in seen:
                raise BlockError(f"the hash {key[:12]}... is named twice: name each hash once")
            if key in moving:
                raise BlockError(f"the block with hash {key[:12]}... is in flight: wait for its transfer first")
            seen.add(key)
        self._free(keys)

    def wait_all(self) -> None:
        """Wait until no transfer is running. If transfers failed, raise the TransferError of the first one."""
        failed = []
        for transfer in tuple(self._transfers):
            try:
                transfer.wait()
            except TransferError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _check_width(self, whole_content: bool) -> None:
        spec, width = self.cache.spec, self.width_bytes
        if not 0 < width <= spec.page_size_bytes:
            raise ValueError(f"width_bytes is {width}, but it must be 1 to {spec.page_size_bytes}, the size of a page")
        if whole_content and width < spec.content_page_size_bytes:
            raise ValueError(
                f"width_bytes is {width}, but a page contains {spec.content_page_size_bytes} bytes of data and "
                f"scales, so the last {spec.content_page_size_bytes - width} bytes of every page would not be copied: "
                f"use width_bytes={spec.content_page_size_bytes}"
            )

    def _check(self, keys: Sequence[str], blocks: Sequence[int]) -> tuple[int, ...]:
        """Check that all blocks exist, and that there is one hash per block. Return the blocks as Python integers."""
        blocks = self.pool.check(blocks)
        if len(keys) != len(blocks):
            raise BlockError(
                f"there are {len(keys)} hashes for {counted(len(blocks), 'block')}: give one hash per block"
            )
        return blocks

    def _check_arrived(self, keys: Sequence[str]) -> None:
        for key in self._moving(True).intersection(keys):
            raise BlockError(
                f"the block with hash {key[:12]}... is still being copied to host memory: wait for its transfer first"
            )

    def _check_idle(self, blocks: Iterable[int]) -> None:
        busy = sorted(self.pool.in_flight & set(blocks))
        if busy:
            raise BlockError(f"blocks {busy} are in flight already: wait for their transfers first")

    def _moving(self, to_host: bool) -> frozenset[str]:
        """Return the hashes of all running transfers to host memory, or of all running transfers back."""
        return frozenset(key for transfer in self._transfers if transfer.to_host == to_host for key in transfer.keys)

    def _free(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._free_slots.append(self._slots.pop(key))

    def _begin(self, keys: Sequence[str], blocks: Sequence[int], to_host: bool) -> Transfer:
        """Mark the blocks as in flight, and start the copy in the thread."""
        self.pool.in_flight.update(blocks)
        places = sorted(zip((self._slots[key] for key in keys), blocks, strict=True))
        caller = self._stream and torch.cuda.current_stream(self._stream.device)
        work = self._executor.submit(self._copy_all, places, to_host, caller)
        transfer = Transfer(keys, blocks, to_host, work, self._end)
        self._transfers.append(transfer)
        return transfer

    def _end(self, transfer: Transfer, arrived: bool) -> None:
        """Tell the pool and the table of stored hashes how a transfer has ended. A second call changes nothing."""
        if transfer not in self._transfers:
            return
        self._transfers.remove(transfer)
        self.pool.in_flight.difference_update(transfer.blocks)
        if transfer.to_host and not arrived:
            self._free(transfer.keys)
        if not transfer.to_host and arrived:
            self.pool.keep(transfer.keys, transfer.blocks)
        if not transfer.to_host and not arrived:
            for block in transfer.blocks:
                self.pool.forget(block)

    def _copy_all(self, places: list[tuple[int, int]], to_host: bool, caller: "torch.cuda.Stream | None") -> None:
        """Copy all blocks of a transfer. This method runs in the thread.

        On a GPU, the copies run on the stream of the offloader. This stream first waits for all earlier work of the
        caller's stream, because this work can still write to the blocks.

        Args:
            places: pairs of the row in ``host``, and the block of the cache.
            to_host: True for a copy to host memory.
            caller: the stream that was current when the transfer began. None on the CPU.
        """
        if self._stream is None:
            self._copy(places, to_host)
            return
        try:
            with torch.cuda.stream(self._stream):
                self._stream.wait_stream(caller)
                self._copy(places, to_host)
        finally:  # wait for all copies, even after an error: when this method returns, the blocks can be used again
            self._stream.synchronize()

    def _copy(self, places: list[tuple[int, int]], to_host: bool) -> None:
        if len(self._stage):
            for first in range(0, len(places), len(self._stage)):
                self._copy_gathered(places[first : first + len(self._stage)], to_host)
            return
        for slot, block in places:
            self._copy_block(slot, block, to_host)

    def _copy_gathered(self, places: list[tuple[int, int]], to_host: bool) -> None:
        """Copy blocks through the staging buffer. If several rows in ``host`` are adjacent, one copy moves them all."""
        blocks = torch.tensor([block for _, block in places], device=self._stage.device)
        if to_host:
            self._gatherer.gather(blocks, self._stage, blocks_checked=True)
        first = 0
        for place in range(1, len(places) + 1):
            if place == len(places) or places[place][0] != places[place - 1][0] + 1:
                host, stage = self.host[places[first][0] :][: place - first], self._stage[first:place]
                target, source = (host, stage) if to_host else (stage, host)
                target.copy_(source, non_blocking=True)
                first = place
        if not to_host:
            self._gatherer.scatter(blocks, self._stage, blocks_checked=True)

    def _copy_block(self, slot: int, block: int, to_host: bool) -> None:
        for piece in self.pieces_of[block]:
            device = self.cache.storages[piece.storage][piece.start : piece.stop]
            host = self.host[slot, piece.at : piece.at + piece.stop - piece.start]
            target, source = (host, device) if to_host else (device, host)
            target.copy_(source, non_blocking=True)

    def _pieces(self, block: int) -> list[Piece]:
        """Return the pieces of one block, sorted by address. Adjacent byte ranges of all layers become one piece."""
        ranges = sorted(one for layer in range(self.cache.spec.num_layers) for one in self._page_ranges(layer, block))
        pieces: list[Piece] = []
        for storage, start, stop in ranges:
            last = pieces[-1] if pieces else None
            if last and (last.storage, last.stop) == (storage, start):
                pieces[-1] = Piece(storage, last.start, stop, last.at)
            else:
                at = last.at + last.stop - last.start if last else 0
                pieces.append(Piece(storage, start, stop, at))
        return pieces

    def _page_ranges(self, layer: int, block: int) -> list[tuple[int, int, int]]:
        """Return the byte ranges of a page that are copied, each as ``(storage, start, stop)``."""
        storage, (runs, length) = layer if len(self.cache.storages) > 1 else 0, self._runs[layer]
        starts = runs[block].tolist()
        if len(starts) == 1:
            return [(storage, starts[0], starts[0] + self.width_bytes)]
        content = self.cache.spec.content_page_size_bytes
        if self.width_bytes != content:
            raise ValueError(
                f"width_bytes is {self.width_bytes}, but in layout {self.cache.layout.name} a page has {len(starts)} "
                f"pieces, and can only be copied whole: use width_bytes={content}"
            )
        return [(storage, start, start + length) for start in starts]
