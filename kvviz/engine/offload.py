"""Blocks to host memory and back: pieces as the layout has them, copies in flight, and nothing half-restored read.

A connector's transfer, without the connector: what a block costs to move depends on the layout alone. A page is copied
with a *width*; vLLM's per-layer path once took ``real_page_size_bytes``, which leaves out the scales, where the
content is ``content_page_size_bytes`` (PR 48411).
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from kvviz.audit.arguments import is_integer
from kvviz.cache.buffers import KVCache, block_runs, check_fits
from kvviz.engine.block_pool import BlockError, BlockPool
from kvviz.kernels.gather import BlockGatherer


class TransferError(RuntimeError):
    """Copies did not all arrive; says which blocks are unusable now."""


class Piece(NamedTuple):
    """Bytes ``[start, stop)`` of one storage that are copied at once, and where they lie in a host block."""

    storage: int
    start: int
    stop: int
    at: int


class Transfer:
    """Copies in flight. ``wait`` ends them, and only then are they true."""

    def __init__(self, offloader: "Offloader", keys: Sequence[str], blocks: Sequence[int], to_host: bool) -> None:
        self._offloader, self.keys, self.blocks, self.to_host = offloader, tuple(keys), tuple(blocks), to_host
        offloader.pool.in_flight.update(blocks)
        offloader._transfers.append(self)
        own = offloader._stream
        self.behind = own and torch.cuda.current_stream(own.device)
        self._work: Future = offloader._executor.submit(offloader._copy_all, self)

    def wait(self) -> None:
        """Return when every copy has arrived.

        Raises:
            TransferError: one did not, each time that this is called. Stored blocks are then not known to the host
                pool, and restored ones not to the prefix cache; whatever was stored before stays.
        """
        error = self._work.exception()  # an interrupt leaves the transfer in flight: wait again
        if self in self._offloader._transfers:
            self._offloader._ended(self, arrived=error is None)
        if error is not None:
            where = "to host memory" if self.to_host else "back from host memory"
            raise TransferError(
                f"the transfer of blocks {list(self.blocks)} {where} failed midway ({error}): these blocks are not "
                f"used, repeat it or compute them"
            ) from error


def check_pool(cache: KVCache, pool: BlockPool) -> None:
    """Raise ValueError if a pool is not of the size of a cache."""
    if pool.num_blocks != cache.spec.num_blocks:
        raise ValueError(
            f"the pool has {pool.num_blocks} blocks and the cache {cache.spec.num_blocks}: "
            f"build the pool with BlockPool({cache.spec.num_blocks})"
        )


class Offloader:
    """Moves whole blocks of all layers between a cache and host memory, pinned where there is a GPU.

    Args:
        cache: the cache on its device.
        pool: the cache's block pool, which learns what is in flight and what has been restored.
        num_host_blocks: blocks that host memory has room for.
        width_bytes: bytes of each page that are copied, from its start; default the content.
        check_width: False copies any width, as the bug did.
        gathered: blocks are first collected on the device, ``gathered`` at a time, and then moved in one piece; 0
            moves every piece by itself, as a connector without a kernel of its own does.

    Raises:
        ValueError: a pool of another size, a number of host blocks below 0, a width that leaves some of the content
            behind or exceeds the page, or any width but the content of pages that are not one run of bytes.
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
        content = cache.spec.content_page_size_bytes
        self.cache, self.pool, self.width_bytes = cache, pool, content if width_bytes is None else width_bytes
        if not 0 < self.width_bytes <= cache.spec.page_size_bytes:
            raise ValueError(
                f"a page is {cache.spec.page_size_bytes} bytes long: {width_bytes} of them cannot be copied"
            )
        if check_width and not content <= self.width_bytes:
            raise ValueError(
                f"a width of {self.width_bytes} bytes is not a page's content of {content}: the last "
                f"{content - self.width_bytes} bytes of every page, data and scales, would stay behind"
            )
        self._runs = [block_runs(kv) for kv in cache.kv_caches]
        self.pieces_of = [self._pieces(block) for block in range(cache.spec.num_blocks)]
        self.block_bytes = sum(piece.stop - piece.start for piece in self.pieces_of[0])
        check_fits(num_host_blocks * self.block_bytes, "cpu")
        on_gpu = cache.storages[0].is_cuda
        self.host = torch.zeros(num_host_blocks, self.block_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._stage = torch.empty(gathered, self.block_bytes, dtype=torch.uint8, device=cache.storages[0].device)
        if gathered:
            self._gatherer = BlockGatherer(cache.storages, self.pieces_of, self.block_bytes)
        self._stream = torch.cuda.Stream(cache.storages[0].device) if on_gpu else None
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(num_host_blocks))
        self._transfers: list[Transfer] = []
        self._executor = ThreadPoolExecutor(1)

    @property
    def stored(self) -> frozenset[str]:
        """Hashes of the blocks that lie in host memory; those that are still on their way there do not yet."""
        return frozenset(self._slots) - self._moving(True)

    def store(self, keys: Sequence[str], blocks: Sequence[int]) -> Transfer:
        """Begin to copy blocks to host memory, each under the hash of its prefix; known hashes are left out.

        Raises:
            BlockError: host memory is too small, a block is in flight or none of the cache's, a hash is on its way
                already, or something is given twice; nothing is copied then.
        """
        self._check(keys, blocks)
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise BlockError(f"the hash {twice[:12]}... is given twice: name each block once")
        self._check_arrived(keys)
        new = {key: block for key, block in zip(keys, blocks, strict=True) if key not in self._slots}
        if len(new) > len(self._free_slots):
            raise BlockError(
                f"{len(new)} blocks are to be stored and host memory has room for {len(self._free_slots)} of its "
                f"{len(self.host)}: drop some, or give it more"
            )
        self._claim(new.values())
        for key in new:
            self._slots[key] = self._free_slots.pop(0)
        return Transfer(self, list(new), list(new.values()), to_host=True)

    def restore(self, keys: Sequence[str], blocks: Sequence[int]) -> Transfer:
        """Begin to copy stored blocks into ``blocks`` of the cache, which the caller holds or which are free.

        The prefix cache knows them when the transfer has ended; free ones are then kept for their prefix.

        Raises:
            BlockError: a block was never stored or has not arrived, a block is in flight, none of the cache's, given
                twice, or kept for another prefix; nothing is copied then.
        """
        self._check(keys, blocks)
        self._check_arrived(keys)
        for key in keys:
            if key not in self._slots:
                raise BlockError(f"the block of hash {key[:12]}... was never stored: compute it instead")
        self.pool.check_names(keys, blocks)
        self._claim(blocks)
        return Transfer(self, keys, blocks, to_host=False)

    def drop(self, keys: Sequence[str]) -> None:
        """Forget stored blocks and reuse their room.

        Raises:
            BlockError: a hash was never stored, or is given twice, or its block is being moved; nothing is forgotten
                then.
        """
        moving, seen = self._moving(True) | self._moving(False), set()
        for key in keys:
            if key not in self._slots or key in seen:
                why = "is given twice" if key in seen else "was never stored"
                raise BlockError(f"the block of hash {key[:12]}... {why}: drop what is stored, and once")
            if key in moving:
                raise BlockError(f"the block of hash {key[:12]}... is in flight: wait for its transfer first")
            seen.add(key)
        for key in keys:
            self._free_slots.append(self._slots.pop(key))

    def wait_all(self) -> None:
        """Wait for everything in flight. Raises the first TransferError, when all have ended."""
        failed = []
        for transfer in tuple(self._transfers):
            try:
                transfer.wait()
            except TransferError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _check(self, keys: Sequence[str], blocks: Sequence[int]) -> None:
        self.pool.check(blocks)
        if len(keys) != len(blocks):
            raise BlockError(f"{len(keys)} hashes cannot name {len(blocks)} blocks: give one hash a block")

    def _check_arrived(self, keys: Sequence[str]) -> None:
        for key in self._moving(True).intersection(keys):
            raise BlockError(f"the block of hash {key[:12]}... is on its way to host memory: wait for it first")

    def _claim(self, blocks: Sequence[int]) -> None:
        busy = sorted(self.pool.in_flight & set(blocks))
        if busy:
            raise BlockError(f"blocks {busy} are in flight already: wait for their transfer first")

    def _moving(self, to_host: bool) -> frozenset[str]:
        return frozenset(key for transfer in self._transfers if transfer.to_host == to_host for key in transfer.keys)

    def _ended(self, transfer: Transfer, arrived: bool) -> None:
        self._transfers.remove(transfer)
        self.pool.in_flight.difference_update(transfer.blocks)
        if transfer.to_host and not arrived:
            self.drop(transfer.keys)
        if not transfer.to_host and arrived:
            self.pool.keep(transfer.keys, transfer.blocks)
        if not transfer.to_host and not arrived:
            for block in transfer.blocks:
                self.pool.forget(block)

    def _copy_all(self, transfer: Transfer) -> None:
        """Runs beside the engine; on a GPU on its own stream, behind all that the caller's stream has been given."""
        if self._stream is None:
            self._copy(transfer)
            return
        try:
            with torch.cuda.stream(self._stream):
                self._stream.wait_stream(transfer.behind)
                self._copy(transfer)
        finally:  # copies launched before one that failed may still run, and their room is given away next
            self._stream.synchronize()

    def _copy(self, transfer: Transfer) -> None:
        pairs = sorted(zip((self._slots[key] for key in transfer.keys), transfer.blocks, strict=True))
        if len(self._stage):
            for first in range(0, len(pairs), len(self._stage)):
                self._copy_gathered(pairs[first : first + len(self._stage)], transfer.to_host)
            return
        for slot, block in pairs:
            self._copy_block(slot, block, transfer.to_host)

    def _copy_gathered(self, pairs: list[tuple[int, int]], to_host: bool) -> None:
        """Blocks through the staging buffer; neighbours in host memory are one copy."""
        blocks = torch.tensor([block for _, block in pairs], device=self._stage.device)
        if to_host:
            self._gatherer.gather(blocks, self._stage, blocks_checked=True)
        first = 0
        for place in range(1, len(pairs) + 1):
            if place == len(pairs) or pairs[place][0] != pairs[place - 1][0] + 1:
                host, stage = self.host[pairs[first][0] :][: place - first], self._stage[first:place]
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
        """Stretches of bytes of one block over all layers, neighbours joined, in the order of their addresses."""
        runs = sorted(run for layer in range(self.cache.spec.num_layers) for run in self._page_runs(layer, block))
        pieces: list[Piece] = []
        for storage, start, stop in runs:
            last = pieces[-1] if pieces else None
            if last and (last.storage, last.stop) == (storage, start):
                pieces[-1] = Piece(storage, last.start, stop, last.at)
            else:
                at = last.at + last.stop - last.start if last else 0
                pieces.append(Piece(storage, start, stop, at))
        return pieces

    def _page_runs(self, layer: int, block: int) -> list[tuple[int, int, int]]:
        """``(storage, start, stop)`` of the bytes of a page that are copied."""
        storage, (runs, length) = layer if len(self.cache.storages) > 1 else 0, self._runs[layer]
        starts = runs[block].tolist()
        if len(starts) == 1:
            return [(storage, starts[0], starts[0] + self.width_bytes)]
        if self.width_bytes != self.cache.spec.content_page_size_bytes:
            raise ValueError(
                f"a page of layout {self.cache.layout.name} is {len(starts)} runs of bytes: it has no width of "
                f"{self.width_bytes} bytes"
            )
        return [(storage, start, start + length) for start in starts]
