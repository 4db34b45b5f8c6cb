"""Real allocations in any layout, and the views that an engine hands to its attention backend."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from kvviz.audit.arguments import one_of
from kvviz.audit.view import Storage, View
from kvviz.cache.layout import Layout, get_layout
from kvviz.cache.scale_views import CARVINGS, carve_from_strides, kv_halves
from kvviz.cache.spec import CacheSpec

CELL_AXES = ("block", "token", "head", "byte")
SCALE_AXES = ("block", "token", "head")

_CGROUP = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))

ScaleViews = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""``(k_scale_cache, v_scale_cache)`` for each layer: float32, ``(B, N, H)``."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """The buffers of one cache and each layer's view of them.

    Attributes:
        spec, layout: what was asked for.
        storages: flat uint8 tensors; one for all layers, or one a layer.
        kv_caches: a tensor a layer, shape ``(B, 2, N, H, C)`` in the split packing or ``(B, H, N, 2C)`` in
            the packed one, C being a cell; uint8, or bfloat16 with C counted in elements.
    """

    spec: CacheSpec
    layout: Layout
    storages: tuple[torch.Tensor, ...]
    kv_caches: tuple[torch.Tensor, ...]

    def storage_of(self, layer: int) -> Storage:
        """The record of the storage that a layer lies in, named ``cache`` or ``layer 3``."""
        shared = len(self.storages) == 1
        return Storage("cache" if shared else f"layer {layer}", self.storages[0 if shared else layer].numel())

    def storages_by_name(self) -> dict[str, torch.Tensor]:
        """The flat storages under the names that :meth:`storage_of` gives them."""
        return {self.storage_of(layer).name: storage for layer, storage in enumerate(self.storages)}

    def owners(self) -> tuple[View, ...]:
        """Who rightly owns what: each layer's K and V data and, where the mode has them, scales.

        Data views have shape ``(B, N, H, data_bytes)`` in bytes. Scales, ``(B, N, H)`` in float32, sit in the
        last four bytes of their cell; with no tail those are data bytes as well.
        """
        views = []
        for layer, kv in enumerate(self.kv_caches):
            storage, cells = self.storage_of(layer), kv_halves(kv)
            for name, half in zip("KV", cells, strict=True):
                data = half.view(torch.uint8)[..., : self.spec.data_bytes]
                views.append(View.of(data, f"layer {layer} {name} data", storage, CELL_AXES, "data"))
        if self.spec.is_per_token_head:
            views += self.writers(tuple(carve_from_strides(kv) for kv in self.kv_caches))
        return tuple(views)

    def writers(self, scales: ScaleViews) -> tuple[View, ...]:
        """The geometry of scale views wherever they were carved: ``layer 0 K scale``, ``layer 0 V scale``, ..."""
        return tuple(
            View.of(scale, f"layer {layer} {name} scale", self.storage_of(layer), SCALE_AXES, "scale")
            for layer, pair in enumerate(scales)
            for name, scale in zip("KV", pair, strict=True)
        )

    def carve_scales(self, carve: str = "strides") -> ScaleViews:
        """Every layer's scale views, not filled.

        Args:
            carve: ``shape`` (vLLM up to 0.25.1) or ``strides`` (0.26.0 and later).

        Raises:
            ValueError: an unknown carving, a mode without per-token-head scales, or bytes that miss a word.
        """
        one_of("carve", carve, tuple(CARVINGS))
        if not self.spec.is_per_token_head:
            raise ValueError(f"mode {self.spec.kv_cache_dtype} has no scales in the cache: nothing to carve")
        return tuple(CARVINGS[carve](kv) for kv in self.kv_caches)

    def ensure_scale_caches(self, carve: str = "strides") -> ScaleViews:
        """Carve every layer's scale views and fill them with 1.0, as the backend does before it first runs."""
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
    """Allocate a cache, every byte set to ``fill``.

    Args:
        layout: a name in ``LAYOUTS`` or a Layout.
        one_storage: for layer-first layouts, whether all layers share one storage (default: one a layer).
            Cross-layer layouts always have one.
        fill: 0 to 255.

    Raises:
        ValueError: an unknown layout, a refused padding, a fill that is no byte, or ``one_storage=False`` with a
            cross-layer layout.
        MemoryError: the buffers do not fit in the device's free memory; nothing has been allocated then.
    """
    layout = get_layout(layout) if isinstance(layout, str) else layout
    strides = layout.strides_bytes(spec)
    if layout.cross_layer and one_storage is False:
        raise ValueError(f"layout {layout.name} interleaves all layers in one buffer: one_storage=False cannot be met")
    if not 0 <= fill <= 255:
        raise ValueError(f"fill is the value of every byte, 0 to 255, not {fill}")
    shared = layout.cross_layer or bool(one_storage)
    check_fits(spec.buffer_bytes, device)
    count, nbytes = (1, spec.buffer_bytes) if shared else (spec.num_layers, spec.layer_bytes)
    storages = tuple(torch.full((nbytes,), fill, dtype=torch.uint8, device=device) for _ in range(count))
    kv_caches = tuple(
        _layer_view(storages[0 if shared else layer], spec, layout, strides, layer * strides["L"] if shared else 0)
        for layer in range(spec.num_layers)
    )
    return KVCache(spec, layout, storages, kv_caches)


def _layer_view(storage: torch.Tensor, spec: CacheSpec, layout: Layout, strides: dict, offset: int) -> torch.Tensor:
    sizes = {"B": spec.num_blocks, "K": 2, "H": spec.num_kv_heads, "N": spec.block_size, "C": spec.cell_bytes}
    if layout.packing == "packed":
        order, sizes = "BHNC", {**sizes, "C": 2 * spec.cell_bytes}
    else:
        order = "BKNHC"
    view = storage.as_strided([sizes[a] for a in order], [strides[a] for a in order], offset)
    return view.view(torch.bfloat16) if spec.kv_cache_dtype == "bfloat16" else view


def block_runs(kv: torch.Tensor) -> tuple[np.ndarray, int]:
    """Where a layer's blocks lie, read off the strides of its view; ``meta`` tensors will do.

    Returns:
        First bytes of the runs of each block in its storage, int64 ``(num_blocks, runs)``, ascending within a block,
        and the length of every run in bytes.
    """
    unit = length = kv.element_size()
    starts = np.zeros(1, np.int64)
    for step, size in sorted(zip(kv.stride()[1:], kv.shape[1:], strict=True)):
        if step * unit == length and len(starts) == 1:
            length *= size
        else:
            starts = (starts[:, None] + np.arange(size) * (step * unit)).ravel()
    blocks = (np.arange(kv.shape[0]) * kv.stride(0) + kv.storage_offset()) * unit
    return blocks[:, None] + np.sort(starts), length


def check_fits(nbytes: int, device: str | torch.device) -> None:
    """Raise MemoryError, with both numbers, if ``nbytes`` exceed the device's free memory. ``meta`` has no limit."""
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
    """GPU memory that this process can still take: what is free, or less where its share is limited."""
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device.index))
    return max(0, min(free, allowed - held) + held - used)


def free_host_bytes() -> int:
    """Host memory that is free: the machine's, or less where a cgroup (v2, v1) limits this process."""
    free = psutil.virtual_memory().available
    for limit, used in _CGROUP:
        with contextlib.suppress(OSError, ValueError):  # no such file; or "max": no limit
            left = int(Path("/sys/fs/cgroup", limit).read_text()) - int(Path("/sys/fs/cgroup", used).read_text())
            free = min(free, max(left, 0))
    return free
