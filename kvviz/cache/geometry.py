"""Where the bytes of a cache lie, in plain integers: for example, layer 1's K data start at byte 4,352.

``allocate`` makes tensors with exactly this geometry. Code that must work without torch uses these views directly.

Every function has the same three arguments: the spec, the layout, and ``one_storage``. True means that one storage
holds all layers. None means the default: one storage per layer, or one for all layers in a cross-layer layout.
"""

from kvviz.audit.view import Storage, View
from kvviz.cache.layout import Layout
from kvviz.cache.spec import CacheSpec

CELL_AXES = ("block", "token", "head", "byte")
SCALE_AXES = ("block", "token", "head")


def storages(spec: CacheSpec, layout: Layout, one_storage: bool | None = None) -> tuple[Storage, ...]:
    """Return the storages of a cache: one named ``cache``, or one per layer, named ``layer 0``, ``layer 1``, ...

    Raises:
        ValueError: ``one_storage`` is False, but the layout is cross-layer.
    """
    if layout.cross_layer and one_storage is False:
        raise ValueError(
            f"layout {layout.name} puts all layers into one buffer, so one_storage must not be False: "
            f"leave it out, or choose a layout with layers outside blocks"
        )
    if layout.cross_layer or one_storage or spec.num_layers == 1:
        return (Storage("cache", spec.buffer_bytes),)
    return tuple(Storage(f"layer {layer}", spec.layer_bytes) for layer in range(spec.num_layers))


def kv_views(spec: CacheSpec, layout: Layout, one_storage: bool | None = None) -> tuple[View, ...]:
    """Return the geometry of each layer's KV view, the tensor that an attention backend gets.

    The shape is ``(B, 2, N, H, C)`` in the split packing and ``(B, H, N, 2C)`` in the packed one. C is the size of a
    cell in elements: one byte per element in a quantised mode, two in bfloat16.

    Raises:
        ValueError: the layout cannot pad its pages, or cannot have one storage per layer.
    """
    sizes = {**layout.axis_sizes(spec), "C": spec.cell_bytes // spec.element_bytes}
    if layout.packing == "packed":
        letters, axes, sizes["C"] = "BHNC", ("block", "head", "token", "element"), 2 * sizes["C"]
    else:
        letters, axes = "BKNHC", ("block", "half", "token", "head", "element")
    steps = layout.strides_bytes(spec)
    # strides_bytes counts single bytes. Here, the innermost axis steps by one element instead.
    stride = tuple(steps[letter] // spec.element_bytes for letter in letters[:-1]) + (1,)
    shape = tuple(sizes[letter] for letter in letters)
    return tuple(
        View(f"layer {layer} KV", storage, shape, stride, start // spec.element_bytes, spec.element_bytes, axes, "data")
        for layer, storage, start in _layers(spec, layout, one_storage)
    )


def owners(spec: CacheSpec, layout: Layout, one_storage: bool | None = None) -> tuple[View, ...]:
    """Return the rightful place of everything in a cache: each layer's K and V data, and then its scales if it has any.

    Data views count bytes: shape ``(B, N, H, data_bytes)``. Scale views have one element per cell: shape
    ``(B, N, H)``. A scale lies in the last bytes of its cell. Without a tail those bytes belong to the data as well.
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
    """Return each layer's number, its storage, and the byte of that storage where the layer starts."""
    held, step = storages(spec, layout, one_storage), layout.strides_bytes(spec)["L"]
    if len(held) == 1:
        return [(layer, held[0], layer * step) for layer in range(spec.num_layers)]
    return [(layer, storage, 0) for layer, storage in enumerate(held)]
