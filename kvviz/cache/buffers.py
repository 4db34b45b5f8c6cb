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
"""Files with the memory limit and the used memory of a container. The first pair is of cgroup version 2, the second
pair is of version 1."""

ScaleViews = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""For each layer, the pair ``(k_scale_cache, v_scale_cache)``. Both tensors have shape ``(B, N, H)`` and the scale
dtype of the mode. B is the number of blocks, N the number of tokens per block, and H the number of KV heads."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """The buffers of one cache, and one KV view per layer.

    Attributes:
        spec: the size and the mode of the cache.
        layout: the layout of the cache.
        storages: flat uint8 tensors. There is one storage for all layers, or one storage per layer.
        kv_caches: the KV view of each layer, of dtype uint8 or bfloat16. In the split packing, the shape is
            ``(B, 2, N, H, C)``. In the packed packing, the shape is ``(B, H, N, 2C)``. C is the number of elements of a
            cell.
    """

    spec: CacheSpec
    layout: Layout
    storages: tuple[torch.Tensor, ...]
    kv_caches: tuple[torch.Tensor, ...]

    @property
    def _one_storage(self) -> bool:
        return len(self.storages) == 1

    def storage_of(self, layer: int) -> Storage:
        """Return the storage of a layer. The name of the storage is ``cache`` or, for example, ``layer 3``."""
        records = geometry.storages(self.spec, self.layout, self._one_storage)
        return records[0 if self._one_storage else layer]

    def storages_by_name(self) -> dict[str, torch.Tensor]:
        """Return a dict with the flat tensor of each storage. The keys are the names of :meth:`storage_of`."""
        return {self.storage_of(layer).name: storage for layer, storage in enumerate(self.storages)}

    def owners(self) -> tuple[View, ...]:
        """Return views of the rightful places of K data, V data and scales of all layers.

        The views are described at :func:`kvviz.cache.geometry.owners`.
        """
        return geometry.owners(self.spec, self.layout, self._one_storage)

    def writers(self, scales: ScaleViews) -> tuple[View, ...]:
        """Return the geometry of scale views. It does not matter how the scale views were carved.

        The names are ``layer 0 K scale``, ``layer 0 V scale``, and so on.
        """
        return tuple(
            View.of(scale, f"layer {layer} {name} scale", self.storage_of(layer), geometry.SCALE_AXES, "scale")
            for layer, pair in enumerate(scales)
            for name, scale in zip("KV", pair, strict=True)
        )

    def carve_scales(self, carve: str = "strides") -> ScaleViews:
        """Return the scale views of every layer. No byte of the cache changes.

        Args:
            carve: ``shape`` as in vLLM up to 0.25.1, or ``strides`` as in vLLM 0.26.0 and later.

        Raises:
            ValueError: ``carve`` is another word. Or the mode has no scales in the cache. Or an address of a scale
                would not be a multiple of the size of a scale.
        """
        one_of("carve", carve, tuple(CARVINGS))
        mode = self.spec.mode
        if not mode.is_per_token_head:
            raise ValueError(
                f"mode {mode.name} has no scales in the cache, so it has no scale views: use a per-token-head mode"
            )
        return tuple(CARVINGS[carve](kv, getattr(torch, mode.scale_dtype)) for kv in self.kv_caches)

    def ensure_scale_caches(self, carve: str = "strides") -> ScaleViews:
        """Carve the scale views of every layer, and fill all scales with 1.0.

        vLLM's backend does this before the first forward pass.
        """
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
        layout: a Layout, or a name in ``LAYOUTS``.
        device: a torch device. On ``meta``, tensors have shapes and strides, but no memory.
        one_storage: True for one storage for all layers, False for one storage per layer. Default: False, but True in
            a cross-layer layout.
        fill: an integer from 0 to 255.

    Raises:
        ValueError: the layout does not exist, or cannot pad pages. Or ``fill`` is not an integer from 0 to 255. Or
            ``one_storage`` is False, but the layout is cross-layer.
        MemoryError: the buffers do not fit into the free memory of the device. Nothing is then allocated.
    """
    layout = get_layout(layout)
    if not is_integer(fill) or fill > 255:
        raise ValueError(
            f"fill is {fill!r}, but it must be an integer from 0 to 255, because every byte gets this value"
        )
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
    """Return the byte ranges of each block of a layer, computed from the strides of the KV view of the layer.

    A byte range is as long as the layout allows. All byte ranges have the same length. ``kv`` may be a ``meta`` tensor.

    Returns:
        Two values. The first is an int64 array of shape ``(num_blocks, ranges)`` with the first byte of each range in
        the storage. In each row, the numbers ascend. The second is the length of every range in bytes.
    """
    itemsize = length = kv.element_size()
    starts = np.zeros(1, np.int64)
    # Go from the innermost axis to the outermost axis. As long as there is no gap between the bytes, each axis makes
    # the range longer. After the first gap, each axis adds copies of the ranges.
    for step, size in sorted(zip(kv.stride()[1:], kv.shape[1:], strict=True)):
        if step * itemsize == length and len(starts) == 1:
            length *= size
        else:
            starts = (starts[:, None] + np.arange(size) * (step * itemsize)).ravel()
    blocks = (np.arange(kv.shape[0]) * kv.stride(0) + kv.storage_offset()) * itemsize
    return blocks[:, None] + np.sort(starts), length


def check_fits(nbytes: int, device: str | torch.device) -> None:
    """Raise MemoryError if ``nbytes`` is more than the free memory of the device. On ``meta`` there is no limit."""
    device = torch.device(device)
    if device.type == "meta":
        return
    free = _free_gpu_bytes(device) if device.type == "cuda" else free_host_bytes()
    if nbytes > free:
        raise MemoryError(
            f"the cache needs {nbytes} bytes, but {device} has {free} bytes free: use fewer blocks or layers. "
            "If you need only the geometry, use device='meta'."
        )


def _free_gpu_bytes(device: torch.device) -> int:
    """Return how many bytes of GPU memory this process can still allocate.

    A limit of ``gpu_budget.keep`` can make this number smaller than the free memory.
    """
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device.index))
    # torch holds more memory than its tensors use. New tensors get this unused memory first.
    return max(0, min(free, allowed - held) + held - used)


def free_host_bytes() -> int:
    """Return the bytes of memory that this process can still use on the machine, or in its container (cgroup)."""
    free = psutil.virtual_memory().available
    for limit, used in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # the file does not exist, or contains "max" for no limit
            left = int(Path("/sys/fs/cgroup", limit).read_text()) - int(Path("/sys/fs/cgroup", used).read_text())
            free = min(free, max(left, 0))
    return free
