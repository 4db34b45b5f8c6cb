"""Serves prompts with a small random Gemma-4 model in vLLM, and compares every layer with references.

``benchmarks/open_case.py`` starts this file in the environment of the engine: ``python open_case_inside.py job.json``.
The file imports nothing of kvviz except two files that need no other part of kvviz.

After each write, the watch computes the cells that the layer should write, and compares the bytes. After each read, it
compares all cells inside the attention windows with the cells that were written. Then it computes attention in float32
from the expected cells, and compares the outputs.
"""

import importlib.util
import json
import random
import sys
import time
import zlib
from pathlib import Path

TILE = 32
"""Tokens that one step of the attention kernel loads, in its one-pass form."""


def load_file(name, path):
    """Import one file as a module, without its package."""
    found = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def main(job_path):
    """Run the job, and write result.json beside the job."""
    job = json.loads(Path(job_path).read_text())
    stand_ins = load_file("stand_ins", job["stand_ins"])
    parts = stand_ins.place_early()
    import torch
    import vllm

    if job["repair"]:
        parts.append(repaired(Path(vllm.__file__).parent, Path(job_path).parent, *job["repair"]))
    parts += stand_ins.place()
    started = time.monotonic()
    llm = vllm.LLM(**job["llm"])
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    for name, weight in runner.model.named_parameters():
        torch.manual_seed(zlib.crc32(name.encode()))
        if weight.dim() >= 2:
            weight.data = torch.randn(weight.shape) / weight.shape[-1] ** 0.5
        elif "norm" in name:
            weight.data = torch.ones_like(weight)
    layers = {
        name: layer
        for name, layer in runner.vllm_config.compilation_config.static_forward_context.items()
        if hasattr(layer, "impl")
    }
    watch = Watch(torch, layers)
    watch.place()
    loaded = round(time.monotonic() - started, 1)
    runs = []
    for run in job["runs"]:
        if run["cold"] == "reset":
            for layer in layers.values():
                layer.impl._k_scale_cache = layer.impl._v_scale_cache = None
        elif run["cold"] == "touched":
            for layer in layers.values():
                layer.impl._ensure_scale_caches(layer.kv_cache)
        watch.begin(run.get("plant", False))
        began = time.monotonic()
        tokens = serve(vllm, llm, run)
        runs.append({**run, "tokens": tokens, **watch.end(), "seconds": round(time.monotonic() - began, 1)})
        print(json.dumps({key: runs[-1][key] for key in ("lengths", "cold", "seconds", "summary")}), flush=True)
    writer = load_file("kvviz_writer", job["writer"])
    tensors = writer.tensors_of_vllm({name: layer for name, layer in layers.items()
                                      if not layer.kv_sharing_target_layer_name})  # fmt: skip
    groups = [(type(group.kv_cache_spec).__name__, list(group.layer_names))
              for group in runner.kv_cache_config.kv_cache_groups]  # fmt: skip
    of_group = [([name for name in tensors if name.rpartition(" ")[0].rpartition(" ")[0] in names], 1)
                for _, names in groups]  # fmt: skip
    writer.write_views(job["views"], tensors, of_group)
    result = {
        "version": vllm.__version__, "replaced": parts, "loaded_seconds": loaded, "runs": runs, "groups": groups,
        "shares": {name: layer.kv_sharing_target_layer_name for name, layer in layers.items()
                   if layer.kv_sharing_target_layer_name},
        "backend": sorted({type(layer.impl).__name__ for layer in layers.values()}),
        "num_blocks": runner.kv_cache_config.num_blocks,
    }  # fmt: skip
    Path(job_path).with_name("result.json").write_text(json.dumps(result))


def repaired(package, folder, old, new):
    """Load vLLM's attention kernel with the line ``old`` replaced by ``new``. Return the entry for the record."""
    source = (package / "v1/attention/ops/triton_unified_attention.py").read_text()
    if source.count(old) != 1:
        raise ValueError(f"the kernel has the line {old!r} {source.count(old)} times, not once: check the release")
    copy = folder / "triton_unified_attention.py"
    copy.write_text(source.replace(old, new))
    load_file("vllm.v1.attention.ops.triton_unified_attention", copy)
    return {"part": "one line of the attention kernel", "ours": new, "why": f"to test a repair of {old}"}


def serve(vllm, llm, run):
    """Serve prompts of the lengths ``run["lengths"]`` at once. Return the token ids of each answer."""
    prompts = []
    for number, length in enumerate(run["lengths"]):
        chosen = random.Random(f"{run.get('seed', 0)} {number} {length}")
        prompts.append({"prompt_token_ids": [chosen.randrange(10, 2000) for _ in range(length)]})
    sampling = vllm.SamplingParams(temperature=0, max_tokens=run["new"], detokenize=False, ignore_eos=True)
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, sampling, use_tqdm=False)]


class Watch:
    """Compares each write and each read of every layer with references.

    ``layers``: vLLM's attention layers, by name. A *step* is one forward pass of the model.
    """

    def __init__(self, torch, layers):
        self.torch, self.layers = torch, layers
        self.numbers = {name: number for number, name in enumerate(layers)}
        self.of_impl = {id(layer.impl): layer for layer in layers.values()}
        self.begin()

    def begin(self, planting=False):
        """Start the record of one run. If ``planting``, see :meth:`plant`."""
        self.planting, self.planted = planting, 0
        self.step, self.fills, self.places, self.poison, self.started = 0, [], [], [], False
        self.expected = {}  # name of the layer that owns a cache -> slot -> (bytes of the cell, K, V)
        self.found = [
            {"layer": number, "cells_written": 0, "wrong_written": 0, "cells_read": 0, "wrong_read": 0,
             "wrong_tokens_in_block": [], "outside_window": 0, "foreign": 0, "not_finite_scales": 0,
             "not_finite_outputs": 0, "largest_difference": 0.0}
            for number in self.numbers.values()
        ]  # fmt: skip

    def end(self):
        """Return the record of the run."""
        for found in self.found:
            found["wrong_tokens_in_block"] = sorted(set(found["wrong_tokens_in_block"]))
            found["largest_difference"] = round(found["largest_difference"], 8)
        added = [name for name in self.found[0] if isinstance(self.found[0][name], int) and name != "layer"]
        summary = {name: sum(found[name] for found in self.found) for name in added}
        summary["largest_difference"] = max(found["largest_difference"] for found in self.found)
        return {
            "steps": self.step, "planted": self.planted, "summary": summary, "layers": self.found, "fills": self.fills,
            "first_wrong": self.places[:1], "not_finite": self.poison[:2],
        }  # fmt: skip

    def place(self):
        """Wrap the functions of the backend that make scale views, write and read."""
        from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl as impl

        write, read, scales, watch = impl.do_kv_cache_update, impl.forward, impl._ensure_scale_caches, self

        def watched_scales(self, kv_cache):
            if self._k_scale_cache is not None or not watch.started:
                return scales(self, kv_cache)
            before = kv_cache.untyped_storage().clone()
            scales(self, kv_cache)
            watch.filled(watch.of_impl[id(self)], before, kv_cache)

        def watched_write(self, layer, key, value, kv_cache, slot_mapping):
            watch.started = True
            write(self, layer, key, value, kv_cache, slot_mapping)
            watch.written(layer, key, value, kv_cache, slot_mapping)

        def watched_read(self, layer, query, key, value, kv_cache, attn_metadata, output, *given, **named):
            slots, kept = (
                watch.plant(layer, kv_cache, attn_metadata) if watch.planting and attn_metadata else ([], None)
            )
            made = read(self, layer, query, key, value, kv_cache, attn_metadata, output, *given, **named)
            if len(slots):
                size = kv_cache.shape[2]
                kv_cache[slots // size, :, slots % size] = kept
            if attn_metadata is not None:
                watch.seen(layer, query, kv_cache, attn_metadata, output)
            return made

        impl._ensure_scale_caches, impl.do_kv_cache_update, impl.forward = watched_scales, watched_write, watched_read

    def owner(self, layer):
        """Return the name of the layer that owns the cache which ``layer`` reads."""
        return layer.kv_sharing_target_layer_name or layer.layer_name

    def cells(self, kv_cache, slots):
        """Return the bytes of the cells of slots, as uint8 of shape (S, H, C): K and V with their scales."""
        size = kv_cache.shape[2]
        return kv_cache[slots // size, :, slots % size].contiguous().view(self.torch.uint8)

    def encoded(self, key, value, int8):
        """Return the cells that a layer should write for K and V of shape (T, H, D), and the values they stand for."""
        torch, stored, values = self.torch, [], []
        for part in (key, value):
            part = part.float().contiguous()
            if int8:
                scale = (part.abs().amax(-1, keepdim=True) / 127.0).clamp_min(1e-6)
                code = part * (1.0 / scale)
                code = torch.where(code >= 0, code + 0.5, code - 0.5).clamp(-128, 127).trunc().to(torch.int8)
                stored += [code.view(torch.uint8), scale.contiguous().view(torch.uint8)]
                values.append(code.float() * scale)
            else:
                stored.append(part.view(torch.uint8))
                values.append(part)
        return torch.cat(stored, -1), values

    def place_of(self, layer, kv_cache, slot, got, want):
        """Return where the first wrong byte of a cell lies, as a dict."""
        head, byte = (int(number) for number in (got != want).nonzero()[0])
        size, item = kv_cache.shape[2], kv_cache.element_size()
        block, head_step, token = (step * item for step in kv_cache.stride()[:3])
        start = kv_cache.storage_offset() * item + slot // size * block + slot % size * token + head * head_step
        word = slice(byte // 4 * 4, byte // 4 * 4 + 4)
        return {
            "step": self.step, "layer": self.numbers[layer.layer_name], "block": slot // size, "token": slot % size,
            "head": head, "byte_in_cell": byte, "byte": start + byte, "wrong_bytes": int((got != want).sum()),
            "got": got[head, word].tolist(), "want": want[head, word].tolist(),
        }  # fmt: skip

    def filled(self, layer, before, kv_cache):
        """Note which live cells the first fill of a layer's scale views changed."""
        torch, victims, first = self.torch, {}, None
        old = torch.empty(0, dtype=kv_cache.dtype).set_(before)
        for name, book in self.expected.items():
            theirs = self.layers[name].kv_cache
            slots = torch.tensor(list(book))
            was = self.cells(old.as_strided(theirs.shape, theirs.stride(), theirs.storage_offset()), slots)
            now = self.cells(theirs, slots)
            changed = (was != now).flatten(1).any(1)
            if changed.any():
                size = theirs.shape[2]
                hit = slots[changed]
                victims[self.numbers[name]] = {
                    "cells": len(hit), "of": len(slots), "tokens_in_block": sorted(set((hit % size).tolist())),
                    "bytes": int((was != now).sum()),
                }  # fmt: skip
                at = int(changed.nonzero()[0])
                first = first or self.place_of(self.layers[name], theirs, int(slots[at]), now[at], was[at])
        self.fills.append({"step": self.step, "by_layer": self.numbers[layer.layer_name], "changed": victims,
                           "first_byte": first})  # fmt: skip

    def written(self, layer, key, value, kv_cache, slot_mapping):
        """Compare the cells of one write with the cells that K and V give."""
        torch = self.torch
        count = min(len(slot_mapping), len(key))
        kept = (slot_mapping[:count] >= 0).nonzero()[:, 0]
        slots = slot_mapping[kept].long()
        heads, width, int8 = kv_cache.shape[1], kv_cache.shape[3] // 2, kv_cache.dtype == torch.int8
        size = width - 4 if int8 else width
        want, values = self.encoded(key.view(-1, heads, size)[kept], value.view(-1, heads, size)[kept], int8)
        got = self.cells(kv_cache, slots)
        wrong = (got != want).flatten(1).any(1)
        book = self.expected.setdefault(self.owner(layer), {})
        for place, slot in enumerate(slots.tolist()):
            book[slot] = (want[place], values[0][place], values[1][place])
        for place in wrong.nonzero()[:1, 0].tolist():
            self.places.append(
                {"op": "write", **self.place_of(layer, kv_cache, int(slots[place]), got[place], want[place])}
            )
        found = self.found[self.numbers[layer.layer_name]]
        found["cells_written"] += len(slots)
        found["wrong_written"] += int(wrong.sum())

    def seen(self, layer, query, kv_cache, meta, output):
        """Compare the cells that one read may use, and the outputs, with what the expected cells give."""
        torch, impl, size = self.torch, layer.impl, kv_cache.shape[2]
        starts, lengths = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
        window = impl.sliding_window[0] + 1 if impl.sliding_window[0] >= 0 else 1 << 30
        book, found = self.expected[self.owner(layer)], self.found[self.numbers[layer.layer_name]]
        for request, length in enumerate(lengths):
            rows = slice(starts[request], starts[request + 1])
            if rows.stop <= rows.start:
                continue
            asked = query[rows].view(rows.stop - rows.start, impl.num_heads, -1).float()
            positions = torch.arange(length - len(asked), length)
            low = max(0, int(positions[0]) - window + 1)
            live, table = torch.arange(low, length), meta.block_table[request].long()
            slots = table[live // size] * size + live % size
            stored = [book[slot] for slot in slots.tolist()]
            want, got = torch.stack([cell[0] for cell in stored]), self.cells(kv_cache, slots)
            wrong = (got != want).flatten(1).any(1)
            found["cells_read"] += len(slots)
            found["wrong_read"] += int(wrong.sum())
            found["wrong_tokens_in_block"] += (slots[wrong] % size).tolist()
            for place in wrong.nonzero()[:1, 0].tolist():
                self.places.append(
                    {"op": "read", **self.place_of(layer, kv_cache, int(slots[place]), got[place], want[place])}
                )
            self.outside(layer, kv_cache, table, low)
            made = output[rows].view(len(asked), impl.num_heads, -1).float()
            per_head = impl.num_heads // kv_cache.shape[1]
            key, value = (
                torch.stack([cell[part] for cell in stored]).repeat_interleave(per_head, 1) for part in (1, 2)
            )
            score = torch.einsum("qhd,khd->hqk", asked, key) * impl.scale
            visible = (live[None] <= positions[:, None]) & (live[None] > positions[:, None] - window)
            share = score.masked_fill(~visible, float("-inf")).softmax(-1)
            gap = (made - torch.einsum("hqk,khd->qhd", share, value)).abs()
            finite = torch.isfinite(gap)
            found["not_finite_outputs"] += int((~finite).sum())
            if finite.any():
                found["largest_difference"] = max(found["largest_difference"], float(gap[finite].max()))
        if found["layer"] == len(self.found) - 1:
            self.step += 1

    def plant(self, layer, kv_cache, meta):
        """Fill freed blocks that the first tile of the kernel loads with bytes 0xFF, for layer 0 only.

        In an int8 cache these bytes are codes of -1, in a float32 cache they are NaN. The window has left these
        blocks, so the engine may give them to another layer. Return the slots and their former content. The caller puts
        the content back after the read.
        """
        torch, size, window = self.torch, kv_cache.shape[2], layer.impl.sliding_window[0] + 1
        if self.numbers[layer.layer_name] or len(meta.seq_lens) != 1:
            return [], None
        low = max(0, int(meta.seq_lens[0] - meta.query_start_loc[1]) - window + 1)
        loaded = torch.arange(low // TILE * TILE, low // size * size)
        slots = meta.block_table[0].long()[loaded // size] * size + loaded % size
        kept = kv_cache[slots // size, :, slots % size].clone()
        fill = torch.full_like(kept.view(torch.uint8), 255).view(kept.dtype)
        kv_cache[slots // size, :, slots % size] = fill
        self.planted += len(slots)
        return slots, kept

    def outside(self, layer, kv_cache, table, low):
        """Look at the cells before the window that the first tile of the kernel loads too, and must not use."""
        torch, size, number = self.torch, kv_cache.shape[2], self.numbers[layer.layer_name]
        loaded = torch.arange(low // TILE * TILE, low)
        if not len(loaded):
            return
        book, found = self.expected[self.owner(layer)], self.found[number]
        slots = table[loaded // size] * size + loaded % size
        got = self.cells(kv_cache, slots)
        found["outside_window"] += len(loaded)
        for slot, cell in zip(slots.tolist(), got, strict=True):
            found["foreign"] += slot not in book or not torch.equal(cell, book[slot][0])
        if kv_cache.dtype == torch.int8:
            scale = got[..., -4:].contiguous().view(torch.float32)[..., 0]
            bad = ~torch.isfinite(scale)
            found["not_finite_scales"] += int(bad.sum())
            for place, head in bad.nonzero()[:1].tolist():
                slot = int(slots[place])
                users = [self.numbers[name] for name, other in self.expected.items()
                         if name != self.owner(layer) and slot // size in {one // size for one in other}]  # fmt: skip
                self.poison.append({
                    "step": self.step, "layer": number, "position": int(loaded[place]), "window_starts": low,
                    "block": slot // size, "token": slot % size, "head": head,
                    "bytes": got[place, head, -4:].tolist(), "other_layers_in_this_block": users,
                })  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
