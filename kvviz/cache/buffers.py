"""Allocate a KV cache in any layout, and make the views that an engine hands to its attention backend."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from kvviz.audit.arguments import is_integer, one_of
from kvviz.audit.view import Storage, View
from kvviz.cache import geometry
from kvviz.cache.layout import Layout, get_layout
from kvviz.cache.scale_views import CARVINGS
from kvviz.cache.spec import CacheSpec

_CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""The files that hold a container's memory limit and its use: cgroup version 2, then version 1."""

ScaleViews = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""``(k_scale_cache, v_scale_cache)`` for each layer, each of shape ``(B, N, H)`` in the mode's scale dtype."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """The buffers of one cache, and one view of them per layer.

    Attributes:
        spec, layout: the arguments of :func:`allocate`.
        storages: flat uint8 tensors: one for all layers, or one per layer.
        kv_caches: one tensor per layer. Its shape is ``(B, 2, N, H, C)`` in the split packing and ``(B, H, N, 2C)``
            in the packed one. C is the size of a cell in elements, and an element is uint8 or bfloat16.
    """

    spec: CacheSpec
    layout: Layout
    storages: tuple[torch.Tensor, ...]
    kv_caches: tuple[torch.Tensor, ...]

    @property
    def _one_storage(self) -> bool:
        return len(self.storages) == 1

    def storage_of(self, layer: int) -> Storage:
        """Return the record of the storage that holds a layer. Its name is ``cache`` or, for example, ``layer 3``."""
        records = geometry.storages(self.spec, self.layout, self._one_storage)
        return records[0 if self._one_storage else layer]

    def storages_by_name(self) -> dict[str, torch.Tensor]:
        """Return the flat storages by the names of :meth:`storage_of`."""
        return {self.storage_of(layer).name: storage for layer, storage in enumerate(self.storages)}

    def owners(self) -> tuple[View, ...]:
        """Return the rightful place of everything: each layer's K and V data, and its scales if the mode has scales.

        Data views count bytes: shape ``(B, N, H, data_bytes)``. Scale views have one element per cell: shape
        ``(B, N, H)``. A scale lies in the last bytes of its cell. Without a tail those bytes belong to the data too.
        """
        return geometry.owners(self.spec, self.layout, self._one_storage)

    def writers(self, scales: ScaleViews) -> tuple[View, ...]:
        """Return the geometry of scale views, carved in either way.

        The names are ``layer 0 K scale``, ``layer 0 V scale``, and so on.
        """
        return tuple(
            View.of(scale, f"layer {layer} {name} scale", self.storage_of(layer), geometry.SCALE_AXES, "scale")
            for layer, pair in enumerate(scales)
            for name, scale in zip("KV", pair, strict=True)
        )

    def carve_scales(self, carve: str = "strides") -> ScaleViews:
        """Return the scale views of every layer. Their bytes stay as they are.

        Args:
            carve: ``shape`` (vLLM up to 0.25.1) or ``strides`` (0.26.0 and later).

        Raises:
            ValueError: there is no such way to carve, the mode has no scales in the cache, or the scales would not
                be aligned.
        """
        one_of("carve", carve, tuple(CARVINGS))
        mode = self.spec.mode
        if not mode.is_per_token_head:
            raise ValueError(f"mode {mode.name} has no scales in the cache, so there are no scale views to carve")
        return tuple(CARVINGS[carve](kv, getattr(torch, mode.scale_dtype)) for kv in self.kv_caches)

    def ensure_scale_caches(self, carve: str = "strides") -> ScaleViews:
        """Carve the scale views of every layer and fill them with 1.0, as vLLM's backend does at its first step."""
        views = self.carve_scales(carve)
        for pair in views:
            for scale in pair:
                scale.fill_(1.0)
        return views


def allocate(
    spec: CacheSpec,
    layout: str | Layout,
    device: str | torch.device = "cpu",
    *,
    one_storage: bool | None = None,
    fill: int = 0,
) -> KVCache:
    """Allocate a cache in which every byte has the value ``fill``.

    Args:
        spec: the size and the mode of the cache.
        layout: a Layout, or the name of one in ``LAYOUTS``.
        device: a torch device. ``meta`` gives the geometry alone, without memory.
        one_storage: True if all layers share one storage. The default is one storage per layer, and one for all
            layers in a cross-layer layout.
        fill: an integer from 0 to 255.

    Raises:
        ValueError: the layout does not exist or cannot pad its pages, ``fill`` is not a byte, or ``one_storage`` is
            False with a cross-layer layout.
        MemoryError: the buffers do not fit into the device's free memory. In this case nothing is allocated.
    """
    layout = get_layout(layout)
    if not is_integer(fill) or fill > 255:
        raise ValueError(f"fill is the value of every byte: it must be an integer from 0 to 255, not {fill!r}")
    records = geometry.storages(spec, layout, one_storage)
    check_fits(spec.buffer_bytes, device)
    views = geometry.kv_views(spec, layout, one_storage)
    tensors = {
        record.name: torch.full((record.nbytes,), int(fill), dtype=torch.uint8, device=device) for record in records
    }
    dtype = torch.bfloat16 if spec.mode.code == "bfloat16" else torch.uint8
    kv_caches = tuple(
        tensors[view.storage.name].view(dtype).as_strided(view.shape, view.stride, view.offset) for view in views
    )
    return KVCache(spec, layout, tuple(tensors.values()), kv_caches)


def block_runs(kv: torch.Tensor) -> tuple[np.ndarray, int]:
    """Return the byte ranges of each block of a layer, from the strides of its KV view. A ``meta`` tensor is enough.

    All ranges are as long as the layout allows: the bytes of a range are adjacent, and all ranges have one length.

    Returns:
        The first byte of each range in its storage, int64 ``(num_blocks, ranges)``, ascending within a block; and
        the length of every range in bytes.
    """
    itemsize = length = kv.element_size()
    starts = np.zeros(1, np.int64)
    # Go from the innermost axis to the outermost. If an axis leaves no gap, the ranges grow along it. After the first
    # gap, each axis repeats the ranges.
    for step, size in sorted(zip(kv.stride()[1:], kv.shape[1:], strict=True)):
        if step * itemsize == length and len(starts) == 1:
            length *= size
        else:
            starts = (starts[:, None] + np.arange(size) * (step * itemsize)).ravel()
    blocks = (np.arange(kv.shape[0]) * kv.stride(0) + kv.storage_offset()) * itemsize
    return blocks[:, None] + np.sort(starts), length


def check_fits(nbytes: int, device: str | torch.device) -> None:
    """Raise MemoryError if ``nbytes`` are more than the device's free memory. ``meta`` has no limit."""
    device = torch.device(device)
    if device.type == "meta":
        return
    free = _free_gpu_bytes(device) if device.type == "cuda" else free_host_bytes()
    if nbytes > free:
        raise MemoryError(
            f"the cache needs {nbytes} bytes and {device} has {free} bytes free: "
            f"take fewer blocks or layers, or device='meta' to look at the geometry alone"
        )


def _free_gpu_bytes(device: torch.device) -> int:
    """Return the GPU memory that this process can still take: less than the free memory if its share is limited."""
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device.index))
    # torch holds more memory than its tensors use. New tensors get this unused memory first.
    return max(0, min(free, allowed - held) + held - used)


def free_host_bytes() -> int:
    """Return the free memory of the machine, or less if a cgroup (a container) limits this process."""
    free = psutil.virtual_memory().available
    for limit, used in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # the file does not exist, or holds "max" for no limit
            left = int(Path("/sys/fs/cgroup", limit).read_text()) - int(Path("/sys/fs/cgroup", used).read_text())
            free = min(free, max(left, 0))
    return free
