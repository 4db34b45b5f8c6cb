"""Computes where the bytes of a cache lie. For example, the K data of layer 1 start at byte 4,352.

``allocate`` makes tensors with this geometry. Code that must work without torch uses the views of this module.

Every function has the arguments ``spec``, ``layout`` and ``one_storage``. If ``one_storage`` is True, one storage holds
all layers. If it is False, each layer has its own storage. The default is False, but True in a cross-layer layout.
"""

from kvviz.audit.view import Storage, View
from kvviz.cache.layout import Layout
from kvviz.cache.spec import CacheSpec

CELL_AXES = ("block", "token", "head", "byte")
SCALE_AXES = ("block", "token", "head")


def storages(spec: CacheSpec, layout: Layout, one_storage: bool | None = None) -> tuple[Storage, ...]:
    """Return the storages of a cache. A single storage has the name ``cache``.

    If there is one storage per layer, the names are ``layer 0``, ``layer 1``, and so on.

    Raises:
        ValueError: ``one_storage`` is False, but the layout is cross-layer.
    """
    if layout.cross_layer and one_storage is False:
        raise ValueError(
            f"layout {layout.name} puts all layers into one buffer, so one_storage must not be False: "
            "leave out one_storage, or use a layout with layers outside blocks"
        )
    if layout.cross_layer or one_storage or spec.num_layers == 1:
        return (Storage("cache", spec.buffer_bytes),)
    return tuple(Storage(f"layer {layer}", spec.layer_bytes) for layer in range(spec.num_layers))


def kv_views(spec: CacheSpec, layout: Layout, one_storage: bool | None = None) -> tuple[View, ...]:
    """Return the KV view of each layer. An attention backend gets tensors with this geometry.

    In the split packing, the shape is ``(B, 2, N, H, C)``. In the packed packing, the shape is ``(B, H, N, 2C)``. B is
    the number of blocks, N of tokens per block, H of KV heads, and C of elements per cell. An element has one byte in a
    quantised mode, and two bytes in bfloat16.

    Raises:
        ValueError: the layout cannot pad pages, or cannot have one storage per layer.
    """
    sizes = {**layout.axis_sizes(spec), "C": spec.cell_bytes // spec.element_bytes}
    if layout.packing == "packed":
        letters, axes, sizes["C"] = "BHNC", ("block", "head", "token", "element"), 2 * sizes["C"]
    else:
        letters, axes = "BKNHC", ("block", "half", "token", "head", "element")
    steps = layout.strides_bytes(spec)
    # The numbers of strides_bytes are bytes, but the strides of a view count elements.
    stride = tuple(steps[letter] // spec.element_bytes for letter in letters[:-1]) + (1,)
    shape = tuple(sizes[letter] for letter in letters)
    return tuple(
        View(f"layer {layer} KV", storage, shape, stride, start // spec.element_bytes, spec.element_bytes, axes, "data")
        for layer, storage, start in _layers(spec, layout, one_storage)
    )


def owners(spec: CacheSpec, layout: Layout, one_storage: bool | None = None) -> tuple[View, ...]:
    """Return views of the rightful places of K data, V data and scales of all layers.

    An element of a data view is one byte, and the shape is ``(B, N, H, data_bytes)``. An element of a scale view is the
    scale of one cell, and the shape is ``(B, N, H)``. Scale views exist only if the mode has scales in the cache. A
    scale lies in the last bytes of a cell. If cells have no tail, these bytes belong to the data too.
    """
    steps = layout.strides_bytes(spec)
    shape = (spec.num_blocks, spec.block_size, spec.num_kv_heads)
    stride = tuple(steps[axis] for axis in "BNH")
    data, scales = [], []
    for layer, storage, start in _layers(spec, layout, one_storage):
        for half, name in enumerate("KV"):
            first = start + half * steps["K"]
            where = (storage, (*shape, spec.data_bytes), (*stride, 1), first, 1, CELL_AXES)
            data.append(View(f"layer {layer} {name} data", *where, "data"))
            if width := spec.scale_bytes:
                place = (first + spec.scale_offset_bytes) // width
                where = (storage, shape, tuple(step // width for step in stride), place, width, SCALE_AXES)
                scales.append(View(f"layer {layer} {name} scale", *where, "scale"))
    return (*data, *scales)


def _layers(spec: CacheSpec, layout: Layout, one_storage: bool | None) -> list[tuple[int, Storage, int]]:
    """Return for each layer its number, its storage, and the byte of the storage at which the layer starts."""
    held, step = storages(spec, layout, one_storage), layout.strides_bytes(spec)["L"]
    if len(held) == 1:
        return [(layer, held[0], layer * step) for layer in range(spec.num_layers)]
    return [(layer, storage, 0) for layer, storage in enumerate(held)]
