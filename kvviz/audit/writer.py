"""Writes a views file from inside an engine. Copy this whole file into the engine: it needs the standard library only.

Example for vLLM: ``write_views("/tmp/views.json", tensors_of_vllm(static_forward_context))``. The file holds names,
shapes, strides and sizes. It holds no data of any tensor.
"""

import json


def tensors_of_vllm(layers):
    """Return ``{name: tensor}`` for the layers of vLLM's ``static_forward_context``.

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
                found[f"{name} {half} data"] = _without_tail(cells[half], scales[half])
        elif len(caches) == 1:
            found[f"{name} KV"] = caches[0]
        else:
            found.update({f"{name} KV {number}": cache for number, cache in enumerate(caches)})
        found.update({f"{name} {half} scale": scale for half, scale in scales.items()})
    return found


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


def _without_tail(cells, scales):
    """Return the data of cells. Cells end with their scale only if the scales lie in the same storage."""
    if _address(cells.untyped_storage()) != _address(scales.untyped_storage()):
        return cells
    tail = scales.element_size() // cells.element_size()
    return cells[..., : cells.shape[-1] - tail]


def write_views(path, tensors):
    """Write a views file of ``{name: torch tensor}`` to ``path``.

    The file claims that no two data tensors share a byte, that no two scale tensors share a byte, and that each
    ``X scale`` follows the cells of ``X data`` if there is room between these cells. A tensor is a scale if the last
    word of its name contains "scale".
    """
    tensors = {str(name): tensor for name, tensor in tensors.items()}
    memory = {name: _memory_of(tensor) for name, tensor in tensors.items()}
    pools = _merged(memory.values())
    pool_of = {name: _pool_of(pools, memory[name]) for name in tensors}
    storage_names = {}  # number of a pool -> name of its storage, in order of first use
    views, follows = [], []
    for name, tensor in tensors.items():
        storage = storage_names.setdefault(pool_of[name], f"storage {len(storage_names)}")
        bytes_before = memory[name][1] - pools[pool_of[name]][1]
        views.append(_view_of(name, tensor, storage, bytes_before))
        data_name = name[: -len("scale")] + "data"
        if name.endswith(" scale") and pool_of.get(data_name) == pool_of[name]:
            follows += _follows(name, tensor, data_name, tensors[data_name])
    groups = [[view["name"] for view in views if view["role"] == role] for role in ("data", "scale")]
    file = {
        "format": "kvviz-views",
        "version": 1,
        "storages": [_storage_of(storage_names[n], *pools[n][1:]) for n in storage_names],
        "views": views,
        "claims": [{"kind": "disjoint", "views": group} for group in groups if len(group) > 1] + follows,
    }
    with open(path, "w", encoding="utf-8") as out:
        json.dump(file, out)


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


def _view_of(name, tensor, storage, bytes_before):
    """Return the record of one view. Its tensor's own storage starts ``bytes_before`` bytes into the pool."""
    itemsize = tensor.element_size()
    if bytes_before % itemsize:
        raise ValueError(
            f"{name}: its storage starts {bytes_before} bytes into the shared memory, which is not a multiple of its "
            f"element size, {itemsize} bytes: leave this tensor out"
        )
    last_word = name.lower().replace(".", " ").split(" ")[-1]
    return {
        "name": name,
        "storage": storage,
        "shape": [int(size) for size in tensor.shape],
        "stride": [int(step) for step in tensor.stride()],
        "dtype": {"itemsize": itemsize},
        "offset": int(tensor.storage_offset()) + bytes_before // itemsize,
        "role": "scale" if "scale" in last_word else "data",
    }


def _follows(name, scales, data_name, data):
    """Return the claim that each scale follows its data, or nothing if the cells of ``data`` leave no room for it."""
    one_per_cell = scales.dim() > 0 and data.shape[:-1] == scales.shape and data.stride()[-1] == 1
    if not one_per_cell or min(data.stride()[:-1]) <= data.shape[-1]:
        return []
    at_bytes = data.shape[-1] * data.element_size()
    return [{"kind": "follows", "scale": name, "data": data_name, "at_bytes": at_bytes}]
