"""Write a views file from inside an engine: paste these functions there. They need the standard library only."""


def tensors_of_vllm(layers):
    """``{name: tensor}`` of vLLM's ``static_forward_context``. Paste this function beside :func:`write_views`.

    A layer's ``kv_cache`` is a tensor or a list of them; its ``impl`` holds ``_k_scale_cache`` and ``_v_scale_cache``
    once a forward pass has run. Where they are there, K and V data are given apart and without their tails; the cache
    has shape ``(block, 2, token, head, cell)`` then, or ``(block, head, token, K cell and V cell)``.
    """
    found = {}

    def flat(given):
        return [one for part in given for one in flat(part)] if isinstance(given, (list, tuple)) else [given]

    for name, layer in layers.items():
        caches = [kv for kv in flat(getattr(layer, "kv_cache", None)) if kv is not None and kv.numel()]
        scales = {half: getattr(getattr(layer, "impl", None), f"_{half.lower()}_scale_cache", None) for half in "KV"}
        scales = {half: scale for half, scale in scales.items() if scale is not None and scale.numel()}
        kv, halves = caches[0] if len(caches) == 1 else None, {}
        if kv is not None and kv.dim() == 5 and kv.shape[1] == 2:
            halves = {"K": kv[:, 0], "V": kv[:, 1]}
        elif kv is not None and kv.dim() == 4:
            cell = kv.shape[-1] // 2
            halves = {"K": kv[..., :cell].transpose(1, 2), "V": kv[..., cell:].transpose(1, 2)}
        if halves and all(half in scales and scales[half].shape == cells.shape[:-1] for half, cells in halves.items()):
            for half, cells in halves.items():
                one, other = cells.untyped_storage(), scales[half].untyped_storage()
                within = (one.data_ptr() or one._cdata) == (other.data_ptr() or other._cdata)
                tail = scales[half].element_size() // cells.element_size() if within else 0
                found[f"{name} {half} data"] = cells[..., : cells.shape[-1] - tail]
        else:
            found.update({f"{name} KV {n}" if len(caches) > 1 else f"{name} KV": kv for n, kv in enumerate(caches)})
        found.update({f"{name} {half} scale": scale for half, scale in scales.items()})
    return found


def write_views(path, tensors):
    """Write a kvviz views file of ``{name: torch tensor}``: geometry only. Paste this function where they live."""
    import json

    given, pools, names, views, claims = {str(n): (t, t.untyped_storage()) for n, t in tensors.items()}, [], {}, [], []
    memory = {n: (str(t.device), held.data_ptr() or held._cdata << 40, held.nbytes()) for n, (t, held) in given.items()}
    for device, start, size in sorted(set(memory.values())):
        if pools and pools[-1][0] == device and start < pools[-1][2]:  # memories that overlap are one
            pools[-1][2] = max(pools[-1][2], start + size)
        else:
            pools.append([device, start, start + size])
    homes = {n: max(m for m, pool in enumerate(pools) if pool[:2] <= list(memory[n][:2])) for n in given}
    for name, (tensor, _) in given.items():
        skip, size, of = memory[name][1] - pools[homes[name]][1], tensor.element_size(), name[:-5] + "data"
        if skip % size:
            raise ValueError(f"{name} starts {skip} bytes into its memory, no multiple of its {size}-byte elements")
        view = {"name": name, "storage": names.setdefault(homes[name], f"storage {len(names)}")}
        view |= {"shape": list(map(int, tensor.shape)), "stride": list(map(int, tensor.stride()))}
        view |= {"dtype": {"itemsize": size}, "offset": int(tensor.storage_offset()) + skip // size}
        views.append(view | {"role": "scale" if "scale" in name.lower().replace(".", " ").split(" ")[-1] else "data"})
        data = given[of][0] if tensor.dim() and name.endswith(" scale") and homes.get(of) == homes[name] else tensor
        if data.shape[:-1] == tensor.shape and data.stride()[-1:] == (1,) and min(data.stride()[:-1]) > data.shape[-1]:
            claims.append(
                {"kind": "follows", "scale": name, "data": of, "at_bytes": data.shape[-1] * data.element_size()}
            )
    groups = [[view["name"] for view in views if view["role"] == role] for role in ("data", "scale")]
    claims = [{"kind": "disjoint", "views": group} for group in groups if len(group) > 1] + claims
    storages = [{"name": names[n], "nbytes": pools[n][2] - pools[n][1]} for n in names]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"format": "kvviz-views", "version": 1, "storages": storages, "views": views, "claims": claims}, file)
