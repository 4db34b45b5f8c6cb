"""Copies blocks of the cache to host memory and back, as an offloading connector does.

The layout decides what a copy costs: a block of a cross-layer buffer is one piece of bytes, while a block of
per-layer buffers is one piece per layer. Copies run in a thread. Until a copy has ended, its blocks are *in flight*
and no request may use them. A copy that fails leaves no half-restored block in the prefix cache.

Each page is copied with a *width* in bytes. vLLM's per-layer path once took ``real_page_size_bytes`` as the width.
That number leaves out the scales. The right width is ``content_page_size_bytes`` (PR 48411).
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
    """A transfer failed before all blocks had arrived. The message names the blocks, whose content is not valid."""


class Piece(NamedTuple):
    """Bytes ``[start, stop)`` of one storage that one copy moves. ``at`` is their first byte in a host block."""

    storage: int
    start: int
    stop: int
    at: int


class Transfer:
    """A transfer that has begun. Its result is known after :meth:`wait`.

    Args:
        keys, blocks: hashes and blocks that the transfer moves.
        to_host: True for a copy to host memory, False for a copy back.
        work: the copy in its thread.
        finish: called as ``finish(transfer, arrived)`` each time that the end of the copy has been seen.
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
        """Return when all blocks have arrived. After an interrupt (Ctrl-C), this method can be called again.

        Raises:
            TransferError: a block did not arrive. Every later call raises this error too. After a failed copy to host
                memory, its blocks are not stored. After a failed copy back, its blocks are not in the prefix cache.
                Blocks that were stored before stay stored.
        """
        error = self._work.exception()
        self._finish(self, error is None)
        if error is not None:
            where = "to host memory" if self.to_host else "back from host memory"
            raise TransferError(
                f"the transfer of blocks {list(self.blocks)} {where} failed midway ({error}), so the content of these "
                f"blocks is not valid: repeat the transfer, or compute the blocks again"
            ) from error


def check_pool(cache: KVCache, pool: BlockPool) -> None:
    """Raise ValueError if the pool and the cache have different numbers of blocks."""
    if pool.num_blocks != cache.spec.num_blocks:
        raise ValueError(
            f"the pool has {counted(pool.num_blocks, 'block')}, but the cache has {cache.spec.num_blocks}: "
            f"build the pool with BlockPool({cache.spec.num_blocks})"
        )


class Offloader:
    """Moves whole blocks of all layers between a cache and host memory. With a GPU, the host memory is pinned.

    Args:
        cache: the cache on its device.
        pool: the block pool of the cache. The offloader marks blocks in flight and keeps restored blocks there.
        num_host_blocks: number of blocks for which host memory has room.
        width_bytes: number of bytes that are copied from the start of each page. Default: the content of the page.
        check_width: if False, any width up to the page is copied. A width that is too small shows the bug.
        gathered: number of blocks that are first collected on the device and then moved in one piece. 0: each piece
            is moved by itself, as in a connector without its own kernel.

    Raises:
        ValueError: the pool has another number of blocks, a number is below 0, the width is smaller than the content
            or larger than the page, or a page consists of several pieces and the width is not its content.
        MemoryError: host memory has no room.
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
                raise ValueError(f"{name} must be an integer of at least 0, not {value!r}")
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
        """Return the hashes of the blocks in host memory. A block that has not arrived yet does not count."""
        return frozenset(self._slots) - self._moving(True)

    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> Transfer:
        """Begin to copy blocks to host memory, each with the hash of its prefix. Stored hashes are skipped.

        Raises:
            BlockError: host memory is full, a block does not exist or is in flight, a hash is in flight, or a block
                or a hash is named twice. Then nothing is copied.
        """
        blocks = self._check(keys, blocks)
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise BlockError(f"the hash {twice[:12]}... is named twice: name each block once")
        self._check_arrived(keys)
        new = {key: block for key, block in zip(keys, blocks, strict=True) if key not in self._slots}
        if len(new) > len(self._free_slots):
            raise BlockError(
                f"{counted(len(new), 'block')} must be stored, but only {len(self._free_slots)} of the "
                f"{len(self.host)} blocks of host memory are free: drop stored blocks, or build the offloader with a "
                f"larger num_host_blocks"
            )
        self._check_idle(new.values())
        for key in new:
            self._slots[key] = self._free_slots.pop(0)
        return self._begin(list(new), list(new.values()), to_host=True)

    def restore(self, keys: Sequence[str], blocks: Sequence[int]) -> Transfer:
        """Begin to copy stored blocks into ``blocks`` of the cache. The caller holds these blocks, or they are free.

        When the transfer has ended, the prefix cache contains the blocks. Free blocks are then kept.

        Raises:
            BlockError: a hash was never stored or has not arrived, or a block does not exist, is in flight, is named
                twice, or is kept for another prefix. Then nothing is copied.
        """
        blocks = self._check(keys, blocks)
        self._check_arrived(keys)
        for key in keys:
            if key not in self._slots:
                raise BlockError(f"the block with hash {key[:12]}... was never stored: compute the block instead")
        self.pool.check_names(keys, blocks)
        self._check_idle(blocks)
        return self._begin(keys, blocks, to_host=False)

    def drop(self, keys: Sequence[str]) -> None:
        """Forget stored blocks. Their room in host memory becomes free.

        Raises:
            BlockError: a hash was never stored, is named twice, or is in flight. Then nothing is forgotten.
        """
        moving, seen = self._moving(True) | self._moving(False), set()
        for key in keys:
            if key not in self._slots or key in seen:
                why = "is named twice" if key in seen else "was never stored"
                raise BlockError(f"the block with hash {key[:12]}... {why}: name only stored hashes, and each once")
            if key in moving:
                raise BlockError(f"the block with hash {key[:12]}... is in flight: wait for its transfer first")
            seen.add(key)
        self._free(keys)

    def wait_all(self) -> None:
        """Wait until nothing is in flight. If transfers failed, raise the first TransferError at the end."""
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
            raise ValueError(f"width_bytes must be 1 to {spec.page_size_bytes}, the size of a page, but is {width}")
        if whole_content and width < spec.content_page_size_bytes:
            raise ValueError(
                f"width_bytes is {width}, but a page contains {spec.content_page_size_bytes} bytes of data and "
                f"scales: the last {spec.content_page_size_bytes - width} bytes of every page would not be copied"
            )

    def _check(self, keys: Sequence[str], blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the blocks as Python integers, after a check that they exist and that each has one hash."""
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
            raise BlockError(f"blocks {busy} are in flight already: wait for their transfer first")

    def _moving(self, to_host: bool) -> frozenset[str]:
        """Return the hashes that are in flight in one direction."""
        return frozenset(key for transfer in self._transfers if transfer.to_host == to_host for key in transfer.keys)

    def _free(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._free_slots.append(self._slots.pop(key))

    def _begin(self, keys: Sequence[str], blocks: Sequence[int], to_host: bool) -> Transfer:
        """Mark the blocks as in flight and start the copy in the thread."""
        self.pool.in_flight.update(blocks)
        places = sorted(zip((self._slots[key] for key in keys), blocks, strict=True))
        caller = self._stream and torch.cuda.current_stream(self._stream.device)
        work = self._executor.submit(self._copy_all, places, to_host, caller)
        transfer = Transfer(keys, blocks, to_host, work, self._end)
        self._transfers.append(transfer)
        return transfer

    def _end(self, transfer: Transfer, arrived: bool) -> None:
        """Record the result of a transfer in the pool and in host memory. A second call changes nothing."""
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
        """Copy (host slot, block) pairs. This method runs in the thread.

        On a GPU the copies run on their own stream. They start after all work that the caller's stream already has,
        because this work may still write to the blocks.
        """
        if self._stream is None:
            self._copy(places, to_host)
            return
        try:
            with torch.cuda.stream(self._stream):
                self._stream.wait_stream(caller)
                self._copy(places, to_host)
        finally:  # after an error, earlier copies may still run, and their blocks are free as soon as this returns
            self._stream.synchronize()

    def _copy(self, places: list[tuple[int, int]], to_host: bool) -> None:
        if len(self._stage):
            for first in range(0, len(places), len(self._stage)):
                self._copy_gathered(places[first : first + len(self._stage)], to_host)
            return
        for slot, block in places:
            self._copy_block(slot, block, to_host)

    def _copy_gathered(self, places: list[tuple[int, int]], to_host: bool) -> None:
        """Copy blocks through the staging buffer on the device. Neighbours in host memory are moved in one copy."""
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
        """Return the pieces of one block over all layers, in the order of their addresses. Neighbours are joined."""
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
        """Return ``(storage, start, stop)`` for each byte range of a page that is copied."""
        storage, (runs, length) = layer if len(self.cache.storages) > 1 else 0, self._runs[layer]
        starts = runs[block].tolist()
        if len(starts) == 1:
            return [(storage, starts[0], starts[0] + self.width_bytes)]
        content = self.cache.spec.content_page_size_bytes
        if self.width_bytes != content:
            raise ValueError(
                f"a page of layout {self.cache.layout.name} consists of {len(starts)} pieces, so its width must be "
                f"its content of {content} bytes, but width_bytes is {self.width_bytes}"
            )
        return [(storage, start, start + length) for start in starts]
