"""Writes a views file from inside an engine. Copy this whole file into the engine: it needs the standard library only.

Example for vLLM: ``write_views("/tmp/views.json", tensors_of_vllm(static_forward_context))``. The file holds names,
shapes, strides and sizes. It holds no data of any tensor.

The file has three parts. First there is one function per engine, which collects the tensors of the cache. Then there is
:func:`write_views`. The functions after it each make one part of the file. The names of axes are the words of a
finding: ``layer 0 K data [block 0, token 1, head 17, element 0]``.
"""

import json

CELL = ("block", "token", "head", "element")
"""Names of the axes of K cells or V cells: element 0 is the first element of a cell."""


def tensors_of_vllm(layers):
    """Return ``{name: (tensor, axes)}`` for the layers of vLLM's ``static_forward_context``.

    A layer's ``kv_cache`` is a tensor or a list of tensors. After the first forward pass, its ``impl`` has the scale
    views ``_k_scale_cache`` and ``_v_scale_cache``. If both are there, K data and V data are returned as separate
    tensors that end before the scales. This needs a cache of shape ``(block, 2, token, head, cell)`` or
    ``(block, head, token, K cell and V cell)``. Any other cache is returned whole, with the name ``<layer> KV``.
    """
    found = {}
    for name, layer in layers.items():
        caches = [cache for cache in _flat(getattr(layer, "kv_cache", None)) if cache is not None and cache.numel()]
        scales = _scales_of(layer)
        cells = _cells_of(caches[0]) if len(caches) == 1 else {}
        if cells and all(half in scales and scales[half].shape == cells[half].shape[:-1] for half in cells):
            for half in cells:
                found[f"{name} {half} data"] = _without_tail(cells[half], scales[half]), CELL
        elif len(caches) == 1:
            found[f"{name} KV"] = caches[0], _axes_of_kv(caches[0])
        else:
            found.update({f"{name} KV {number}": (cache, ()) for number, cache in enumerate(caches)})
        for half, scale in scales.items():
            found[f"{name} {half} scale"] = scale, CELL[:3] if scale.dim() == 3 else ()
    return found


def tensors_of_kv_caches(kv_caches):
    """Return ``{name: (tensor, axes)}`` for the dict that vLLM gives to a connector, such as the one of LMCache.

    The dict is the argument of ``register_kv_caches``. It has one tensor per layer, or a list of tensors.
    """
    found = {}
    for name, given in kv_caches.items():
        caches = [cache for cache in _flat(given) if cache is not None and cache.numel()]
        if len(caches) == 1:
            found[f"{name} KV"] = caches[0], _axes_of_kv(caches[0])
        else:
            found.update({f"{name} KV {number}": (cache, ()) for number, cache in enumerate(caches)})
    return found


SGLANG_BUFFERS = {
    "k_buffer": ("K data", ("slot", "head", "element")),
    "v_buffer": ("V data", ("slot", "head", "element")),
    "kv_buffer": ("KV data", ("slot", "head", "element")),
    "k_scale_buffer": ("K scale", ("slot", "element")),
    "v_scale_buffer": ("V scale", ("slot", "element")),
    "kv_scale_buffer": ("KV scale", ("slot", "element")),
}
"""The lists of tensors of SGLang's pools, with names of their views and axes. A list has one tensor per layer."""


def tensors_of_sglang(pool, prefix=""):
    """Return ``{name: (tensor, axes)}`` for SGLang's ``model_runner.token_to_kv_pool``.

    A pool keeps K and V apart (``k_buffer``, ``v_buffer``), or in one tensor per layer (``kv_buffer``: MLA and DSA).
    It may have scales. A DSA pool has index keys with their scales. A hybrid pool has pools inside (``swa_kv_pool``).
    """
    found = {}
    for attribute in ("full_kv_pool", "swa_kv_pool"):
        if hasattr(pool, attribute):
            found.update(tensors_of_sglang(getattr(pool, attribute), f"{prefix}{attribute.split('_')[0]} "))
    if found:
        return found
    first = getattr(pool, "start_layer", 0) or 0
    for attribute, (kind, axes) in SGLANG_BUFFERS.items():
        for number, tensor in enumerate(getattr(pool, attribute, None) or ()):
            named = axes if tensor.dim() == len(axes) else ()
            found[f"{prefix}layer {first + number} {kind}"] = tensor, named
    for number, tensor in enumerate(getattr(pool, "index_k_with_scale_buffer", None) or ()):
        keys = pool.index_page_size * pool.index_head_dim  # bytes: in a page, all keys come first, then all scales
        scales = (tensor.shape[-1] - keys) // pool.index_page_size
        layer = f"{prefix}layer {first + number}"
        data, scale = tensor[:, :keys], tensor[:, keys:]
        shapes = (pool.index_page_size, pool.index_head_dim), (pool.index_page_size, scales)
        found[f"{layer} index K data"] = data.unflatten(1, shapes[0]), ("page", "token", "element")
        found[f"{layer} index K scale"] = scale.unflatten(1, shapes[1]), ("page", "token", "byte")
    return {name: (tensor, axes) for name, (tensor, axes) in found.items() if tensor.numel()}


def tensors_of_transformers(cache):
    """Return ``{name: (tensor, axes)}`` for a cache of transformers: a paged one, or one of ``generate``.

    A ``PagedAttentionCache`` keeps all layers in one tensor. The views of a layer count its blocks. A cache of
    ``generate``, for example ``DynamicCache``, has ``keys`` and ``values`` per layer.
    """
    found = {}
    for number, layer in enumerate(getattr(cache, "layers", ())):
        for half, tensor in (("K", getattr(layer, "keys", None)), ("V", getattr(layer, "values", None))):
            if tensor is not None and tensor.numel():
                found[f"layer {number} {half} data"] = tensor, ("batch", "head", "token", "element")
    for allocator in getattr(cache, "cache_allocators", {}).values():
        for layer, halves in allocator._kv_token_views.items():
            for half, tensor in (("K", halves[0]), ("V", halves[1])):
                row = tensor.shape[1] * tensor.shape[2]  # elements of one token
                block = allocator.bytes_per_block // tensor.element_size()
                count = tensor.untyped_storage().nbytes() // allocator.bytes_per_block
                shape = (count, allocator.tokens_per_page, *tensor.shape[1:])
                strides = (block, row, tensor.shape[2], 1)
                found[f"layer {layer} {half} data"] = tensor.as_strided(shape, strides, tensor.storage_offset()), CELL
    return found


def pools_of_transformers(cache):
    """Return the groups of a ``PagedAttentionCache`` for the argument ``groups`` of :func:`write_views`."""
    return [
        (
            [f"layer {layer} {half} data" for layer in allocator.layer_indices for half in "KV"],
            cache.bytes_per_sector // allocator.bytes_per_block,
        )
        for allocator in cache.cache_allocators.values()
    ]


def _flat(given):
    """Return the tensors of nested lists and tuples as one list."""
    if isinstance(given, (list, tuple)):
        return [tensor for part in given for tensor in _flat(part)]
    return [given]


def _scales_of(layer):
    """Return the scale views of a layer as ``{"K": tensor, "V": tensor}``, without those that do not exist yet."""
    impl = getattr(layer, "impl", None)
    scales = {half: getattr(impl, f"_{half.lower()}_scale_cache", None) for half in "KV"}
    return {half: scale for half, scale in scales.items() if scale is not None and scale.numel()}


def _cells_of(cache):
    """Return the K cells and the V cells of a cache, each with axes (block, token, head, cell)."""
    if cache.dim() == 5 and cache.shape[1] == 2:
        return {"K": cache[:, 0], "V": cache[:, 1]}
    if cache.dim() == 4:
        cell = cache.shape[-1] // 2
        return {"K": cache[..., :cell].transpose(1, 2), "V": cache[..., cell:].transpose(1, 2)}
    return {}


def _axes_of_kv(cache):
    """Return the names of the axes of a whole cache of vLLM, or () if its shape does not show them."""
    shape = tuple(cache.shape)
    if len(shape) == 5 and (shape[0] == 2) != (shape[1] == 2):
        return ("half", "block", *CELL[1:]) if shape[0] == 2 else ("block", "half", *CELL[1:])
    return {4: ("block", "head", "token", "element"), 3: ("block", "token", "element")}.get(len(shape), ())


def _without_tail(cells, scales):
    """Return the data of cells. Cells end with their scale only if the scales lie in the same storage."""
    if _address(cells.untyped_storage()) != _address(scales.untyped_storage()):
        return cells
    tail = scales.element_size() // cells.element_size()
    return cells[..., : cells.shape[-1] - tail]


def write_views(path, tensors, groups=()):
    """Write a views file of ``{name: torch tensor}`` to ``path``.

    The value of a name is a tensor, or a pair of a tensor and the names of its axes. A tensor is a scale if the last
    word of its name contains "scale". The file makes these claims:

    - No two data tensors share a byte. No two scale tensors share a byte.
    - ``X scale`` shares no byte with data, if there is a tensor ``X data`` without tails.
    - Each ``X scale`` follows the cells of ``X data`` if there is room between these cells.

    ``groups`` is for layers that take their blocks from one pool, such as sliding and full layers. A group is a pair:
    the names of its tensors, and how many of their blocks one id of the pool stands for. Tensors of different groups
    may share bytes of one id, and of no other.
    """
    pairs = {str(name): given if isinstance(given, tuple) else (given, ()) for name, given in tensors.items()}
    tensors = {name: tensor for name, (tensor, _) in pairs.items()}
    memory = {name: _memory_of(tensor) for name, tensor in tensors.items()}
    pools = _merged(memory.values())
    pool_of = {name: _pool_of(pools, memory[name]) for name in tensors}
    storage_names = {}  # number of a pool -> name of its storage, in order of first use
    views, follows = [], []
    for name, (tensor, axes) in pairs.items():
        storage = storage_names.setdefault(pool_of[name], f"storage {len(storage_names)}")
        bytes_before = memory[name][1] - pools[pool_of[name]][1]
        views.append(_view_of(name, tensor, axes, storage, bytes_before))
        data_name = name[: -len("scale")] + "data"
        if name.endswith(" scale") and pool_of.get(data_name) == pool_of[name]:
            follows += _follows(name, tensor, data_name, tensors[data_name])
    file = {
        "format": "kvviz-views",
        "version": 1,
        "storages": [_storage_of(storage_names[n], *pools[n][1:]) for n in storage_names],
        "views": views,
        "claims": _apart(views, groups) + follows,
    }
    with open(path, "w", encoding="utf-8") as out:
        json.dump(file, out)


def _apart(views, groups):
    """Return the claims that data and scale tensors share no bytes, and groups share only one id."""
    grouped = {name for names, _ in groups for name in names}
    sets = [[name for name in names if name not in grouped] for names in _disjoint_sets(views)] + [
        list(names) for names, _ in groups
    ]
    claims = [{"kind": "disjoint", "views": names} for names in sets if len(names) > 1]
    if len(groups) > 1:
        names = [name for names, _ in groups for name in names]
        numbers = [blocks_per_id for names, blocks_per_id in groups for _ in names]
        claims.append({"kind": "overlay", "views": names, "blocks_per_id": numbers})
    return claims


def _disjoint_sets(views):
    """Return lists of names. No two views of a list may share a byte.

    A scale view may not share a byte with data if its data view is known and has no tails.
    """
    named = {view["name"]: view for view in views}
    scales = [view["name"] for view in views if view["role"] == "scale"]
    data_of = {name: named.get(name[: -len("scale")] + "data") for name in scales if name.endswith(" scale")}
    apart = [name for name, data in data_of.items() if data and not _ends_its_cell(data, named[name])]
    data_and_scales = [view["name"] for view in views if view["role"] == "data" or view["name"] in apart]
    return [data_and_scales] if len(apart) == len(scales) else [data_and_scales, scales]


def _ends_its_cell(data, scale):
    """Return True if each scale is the last bytes of its cell in a data view that has its tails."""
    if data["storage"] != scale["storage"] or data["shape"][:-1] != scale["shape"] or data["stride"][-1:] != [1]:
        return False
    size, scale_size = data["dtype"]["itemsize"], scale["dtype"]["itemsize"]
    for count, step, scale_step in zip(scale["shape"], data["stride"][:-1], scale["stride"], strict=True):
        if count > 1 and step * size != scale_step * scale_size:
            return False
    return (scale["offset"] + 1) * scale_size == (data["offset"] + data["shape"][-1]) * size


def _storage_of(name, start, stop):
    """Return the record of one storage. It has the address modulo 2 MiB, which alignment needs, and not the address."""
    record = {"name": name, "nbytes": stop - start}
    if start < 1 << 64:  # not the id of a meta storage
        record.update(address=start % (2 << 20), address_modulus=2 << 20)
    return record


def _address(storage):
    """Return the address of a storage. A storage of a meta tensor has no address, so its id stands for it."""
    return storage.data_ptr() or storage._cdata


def _memory_of(tensor):
    """Return (device, first address, bytes) of a tensor's storage."""
    storage = tensor.untyped_storage()
    # Ids of meta storages are close together. Each id is shifted by 40 bits. So two storages of up to 1 TiB do not
    # overlap.
    start = storage.data_ptr() or storage._cdata << 40
    return str(tensor.device), start, storage.nbytes()


def _merged(memories):
    """Return pools ``[device, start, stop]``, sorted. Overlapping memories of one device are merged into one pool."""
    pools = []
    for device, start, nbytes in sorted(set(memories)):
        if pools and pools[-1][0] == device and start < pools[-1][2]:
            pools[-1][2] = max(pools[-1][2], start + nbytes)
        else:
            pools.append([device, start, start + nbytes])
    return pools


def _pool_of(pools, memory):
    """Return the number of the pool that holds a memory: the last pool that does not start after it."""
    return max(number for number, pool in enumerate(pools) if pool[:2] <= list(memory[:2]))


def _view_of(name, tensor, axes, storage, bytes_before):
    """Return the record of one view. Its tensor's own storage starts ``bytes_before`` bytes into the pool."""
    itemsize = tensor.element_size()
    if bytes_before % itemsize:
        raise ValueError(
            f"{name}: its storage starts {bytes_before} bytes into the shared memory, which is not a multiple of its "
            f"element size, {itemsize} bytes: leave this tensor out"
        )
    if axes and len(axes) != tensor.dim():
        raise ValueError(f"{name}: {len(axes)} axis names {tuple(axes)} for a tensor of {tensor.dim()} axes")
    last_word = name.lower().replace(".", " ").split(" ")[-1]
    record = {
        "name": name,
        "storage": storage,
        "shape": [int(size) for size in tensor.shape],
        "stride": [int(step) for step in tensor.stride()],
        "dtype": {"itemsize": itemsize},
        "offset": int(tensor.storage_offset()) + bytes_before // itemsize,
        "role": "scale" if "scale" in last_word else "data",
    }
    if axes:
        record["axes"] = list(axes)
    return record


def _follows(name, scales, data_name, data):
    """Return the claim that each scale follows its data, or nothing if the cells of ``data`` leave no room for it."""
    one_per_cell = scales.dim() > 0 and data.shape[:-1] == scales.shape and data.stride()[-1] == 1
    if not one_per_cell or min(data.stride()[:-1]) <= data.shape[-1]:
        return []
    at_bytes = data.shape[-1] * data.element_size()
    return [{"kind": "follows", "scale": name, "data": data_name, "at_bytes": at_bytes}]
