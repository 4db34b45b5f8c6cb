"""Tests of watch: every changed byte has its owner, and predicted bytes are the bytes that really change."""

import json
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.footprint import FILLS, predict
from kvviz.cache.spec import CacheSpec
from kvviz.engine.generate import PagedBackend, generate
from kvviz.engine.scenarios import SCENARIOS
from kvviz.kernels.runtime import device
from kvviz.kernels.write import write_kv
from kvviz.trace.memory import elements_at, memory_of, where
from kvviz.trace.watch import Allowed, compared_map, compared_with, watch
from tests.audit.random_views import random_view
from tests.engine.tiny import tiny_model

SPEC = CacheSpec(3, 4, 4, 2, 16, "int8_per_token_head")
AXES = ("block", "token", "head", "element")


@pytest.fixture(scope="module")
def little_model():
    return tiny_model()


class TestElements:
    def test_the_element_of_each_byte_is_that_of_a_list_of_all_bytes(self):
        draw, seen = random.Random(0), 0
        while seen < 60:
            view = random_view(draw, "v")
            if not view.nested or not view.num_elements:
                continue
            seen += 1
            at = np.arange(view.span_bytes[0] - 9, view.span_bytes[1] + 9)
            known = dict.fromkeys(at.tolist(), -1)
            for number, start in enumerate(view.starts.ravel().tolist()):
                known |= dict.fromkeys(range(start, start + view.itemsize), number)
            assert elements_at(view, at).tolist() == [known[byte] for byte in at.tolist()]


class TestExact:
    @pytest.mark.parametrize("layout", ["NHD", "cross-layer NHD", "BHLNC"])
    def test_owners_of_random_changes_are_those_of_a_list_of_all_bytes(self, layout):
        cache, lot = allocate(SPEC, layout), np.random.default_rng(1)
        with watch(cache.owners(), cache.storages_by_name()) as seen:
            chosen = {}
            for name, flat in cache.storages_by_name().items():
                at = np.unique(lot.integers(0, flat.numel(), 20))
                flat[torch.from_numpy(at)] = 9
                chosen[name] = at.tolist()
        (step,) = seen.steps
        assert {name: at.tolist() for name, at in step.changed.items()} == chosen
        found = {}
        for one in step.views:
            for cell, nbytes, first in zip(one.cells, one.nbytes, one.first, strict=True):
                found[where(one.view, int(cell))] = (int(nbytes), int(first))
        expected = {}
        for view in cache.owners():
            last = len(SPEC_AXES) if view.role == "data" else None
            for index in np.ndindex(*view.shape):
                start = view.start_of(index)
                hit = [byte for byte in chosen[view.storage.name] if start <= byte < start + view.itemsize]
                name = f"{view.name} [{', '.join(f'{a} {i}' for a, i in zip(SPEC_AXES, index[:last], strict=False))}]"
                if hit:
                    count, first = expected.get(name, (0, hit[0]))
                    expected[name] = (count + len(hit), min(first, hit[0]))
        assert found == expected and step.unowned == 0

    def test_a_change_back_is_seen_in_both_steps(self):
        given = torch.zeros(2, 3, dtype=torch.int16)
        with watch({"k": (given, ("block", "element"))}) as seen:
            given[1, 2] = -1
            seen.step("out")
            given[1, 2] = 0
            seen.step("back")
        assert [step.title for step in seen.steps] == ["out", "back"]
        assert [step.new["storage 0"].tolist() for step in seen.steps] == [[255, 255], [0, 0]]
        assert "k: 2 bytes of 1 cell, first k [block 1]" in str(seen)

    def test_bytes_between_the_views_are_nobodys(self):
        whole = torch.zeros(16, dtype=torch.uint8)
        with watch({"k": whole[:4], "v": whole[8:12]}) as seen:
            whole[3:9] = 1
        (step,) = seen.steps
        assert (step.num_changed, step.unowned, step.num_forbidden) == (6, 4, 4)
        assert step.first_forbidden == "a byte that no view has, byte 4 of storage 0"

    def test_arrays_and_slices_of_arrays(self):
        whole = np.zeros((4, 6), np.float32)
        with watch({"left": whole[:, :3], "right": whole[::-1, 3:]}) as seen:
            whole[0, 4] = 1.0
        assert [one.view.where(one.view.index(int(one.cells[0]))) for one in seen.steps[0].views] == [
            "right [axis 0 3, axis 1 1]"
        ]

    def test_nothing_happens(self):
        given = torch.ones(5)
        with watch({"k": given}) as seen:
            given.add_(0)
        assert seen.steps[0].num_changed == 0 and str(seen).startswith("no forbidden byte changed")


SPEC_AXES = AXES[:3]


class TestAllowed:
    @pytest.mark.parametrize(
        ("allowed", "bad"),
        [
            (Allowed(blocks=[2]), 0),
            (Allowed(slots=[9]), 0),
            (Allowed(slots=[8]), 32),
            (Allowed(blocks=[1]), 32),
            (Allowed(views=["layer 1 K data"]), 0),
            (Allowed(views=["layer 1 V data"], blocks=[2]), 32),
        ],
    )
    def test_cells_are_allowed_by_view_block_or_slot(self, allowed, bad):
        cache = allocate(SPEC, "cross-layer NHD")
        with watch(cache.owners(), cache.storages_by_name(), allowed=allowed) as seen:
            cache.kv_caches[1][2, 0, 1, :, :16] = 5
        assert (seen.steps[0].num_changed, seen.steps[0].num_forbidden) == (32, bad)
        assert bool(seen.first_forbidden) == bool(bad)

    def test_the_first_foreign_write_is_that_of_the_views(self):
        """Scales carved from the shape, in one buffer for all layers: launch, layer and byte are those of the views."""
        spec = CacheSpec(3, 4, 4, 2, 16, "int8_per_token_head")
        cache = allocate(spec, "cross-layer NHD", device())
        scales, slots = cache.carve_scales("shape"), torch.tensor([0, 1, 9], device=device())
        names = {layer: [v.name for v in cache.owners() if v.name.startswith(f"layer {layer} ")] for layer in range(3)}
        writers = {view.name: view for view in cache.writers(scales)}
        lot = torch.Generator().manual_seed(0)
        with watch(cache.owners(), cache.storages_by_name()) as seen:
            for layer in range(3):
                k, v = torch.randn(2, 3, 2, 16, generator=lot).to(device())
                write_kv(k, v, cache.kv_caches[layer], slots, "int8_per_token_head", *scales[layer])
                seen.step(f"write layer {layer}", Allowed(views=names[layer], slots=slots.tolist()))
        for layer, step in enumerate(seen.steps):
            mine = predict([v for v in cache.owners() if v.name in names[layer]], slots.tolist())["cache"]
            scale = predict([writers[f"layer {layer} {half} scale"] for half in "KV"], slots.tolist())["cache"]
            foreign, found = np.flatnonzero(scale & ~mine), step.forbidden["cache"]
            assert set(found.tolist()) <= set(foreign.tolist())
            assert np.unique(found // 4).tolist() == np.unique(foreign // 4).tolist()  # each foreign scale has changed
            assert found[0] // 4 == foreign[0] // 4
        byte = writers["layer 0 K scale"].start_of((2, 1, 0))  # slot 9, which layer 0 seeks in the page of layer 2
        owner = "layer 2 K scale [block 0, token 1, head 0]"
        assert seen.first_forbidden == f"write layer 0: {owner}, byte {byte} of cache"

    def test_unknown_views_and_missing_axes_are_errors(self):
        with pytest.raises(ValueError, match="allowed names the view 'v', but no watched view"):
            watch({"k": torch.zeros(2)}, allowed=Allowed(views=["v"]))
        given = torch.zeros(2)
        with (
            pytest.raises(ValueError, match="no axis with the name 'block'"),
            watch({"k": given}, allowed=Allowed(blocks=[0])),
        ):
            given[0] = 1


class TestScenarios:
    @pytest.mark.parametrize("name", SCENARIOS)
    def test_predicted_and_observed_bytes_are_equal(self, name, little_model):
        which, prompt = SCENARIOS[name], [1, 2, 3, 4, 5]
        watches = []
        for fill in FILLS:
            cache = which.build(little_model.config, 6, little_model.device, fill)
            scales = cache.carve_scales(which.carve) if cache.spec.is_per_token_head else None
            with watch(cache.owners(), cache.storages_by_name()) as seen:
                generate(little_model, PagedBackend(cache, scales), prompt, 1)
            watches.append(seen)
        writers = cache.writers(scales) if scales else ()
        views = [view for view in cache.owners() if view.role == "data"] + list(writers)
        compared = compared_with(predict(views, range(5)), *watches)
        assert compared.equal, str(compared)
        assert sum(int(mask.sum()) for mask in compared.observed.values()) >= 5 * 2 * 2 * 2 * cache.spec.data_bytes
        shown = compared_map(cache.owners(), compared, cache.owners()[0].storage.name)
        assert "Then only one of both" in shown.text and "canvas" in shown.html


class TestRecords:
    def make(self, **kwargs):
        where = "cpu" if kwargs.get("exact", True) else device()  # fingerprints need memory that kernels can read
        cache = allocate(SPEC, "cross-layer NHD", where)
        with watch(cache.owners(), cache.storages_by_name(), **kwargs) as seen:
            cache.kv_caches[0][1, 0, 0, 0, :16] = 3
            seen.step("first")
            cache.kv_caches[2][3, 1, 2, 1, :16] = 4
            seen.step("second")
        return cache, seen

    def test_json_text_and_map_say_the_same(self):
        cache, seen = self.make()
        data = json.loads(json.dumps(seen.as_data()))
        assert [step["changed_bytes"] for step in data["steps"]] == [16, 16]
        assert data["steps"][1]["views"] == [
            {
                "view": "layer 2 V data",
                "storage": "cache",
                "axes": list(SPEC_AXES),
                "cells": [[[3, 2, 1], 3780, 16, True]],
            }
        ]
        assert "first layer 2 V data [block 3, token 2, head 1]" in str(seen)
        shown = seen.map()
        assert shown.frames[1][1] == cache.storages[0].numpy().tobytes()
        assert "Then second: 16 bytes" in shown.text and "second" in shown.html

    def test_a_map_shows_a_window(self):
        cache, seen = self.make()
        assert seen.map(window=(3700, 3800)).frames[1][1] == cache.storages[0][3700:3800].numpy().tobytes()

    def test_fingerprints_name_the_cells_of_their_chunk(self):
        _, seen = self.make(exact=False, allowed=Allowed(blocks=[1]))
        first, second = seen.steps
        assert (first.num_changed, second.num_changed) == (2048, 16)  # the end is shorter than a chunk, so it is exact
        assert first.undecided == 1 and second.num_forbidden == 16 and "block 3" in second.first_forbidden
        assert "lie in chunks that changed" in str(seen) and seen.map().frames[0][1].count(1) == 2048

    def test_a_launch_is_a_step(self):
        given = torch.zeros(4)
        with watch({"k": given}) as seen:
            fill = seen.launch(given.fill_, "fill")
            fill(1.0)
            fill(2.0)
        assert [step.title for step in seen.steps] == ["fill 0", "fill 1"]


class TestBadInput:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({}, "nothing to trace: the 0 tensors"),
            ((), "nothing to trace: there are 0 views"),
            ({"k": torch.zeros(0)}, "the 1 tensors have no elements"),
            ({"k": torch.zeros(2, device="meta")}, "k is on meta and has no bytes in memory"),
            ({"k": torch.zeros(2).to_sparse()}, "give a strided tensor"),
            ({"k": "text"}, "give torch tensors and numpy arrays"),
            ({"k": torch.zeros(2).expand(3, 2)}, "two elements of k share a byte"),
            ([View("k", Storage("s", 4), (4,), (1,))], "the bytes of storage 's' are not given"),
        ],
    )
    def test_the_error_says_what_to_do(self, given, message):
        with pytest.raises(ValueError, match=message):
            watch(given)

    def test_freed_memory(self):
        given = torch.zeros(64)
        memory = memory_of({"k": given})
        given.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="k is on cpu and has no bytes|k reaches from byte"):
            memory_of({"k": given})
        assert memory.flats["storage 0"].numel() == 256

    @pytest.mark.parametrize("flat", [torch.zeros(3, dtype=torch.uint8), torch.zeros(4)])
    def test_a_storage_of_another_size_or_type(self, flat):
        with pytest.raises(ValueError, match=r"must be a uint8 tensor of shape \(4,\)"):
            watch([View("k", Storage("s", 4), (4,), (1,))], {"s": flat})

    def test_an_error_in_the_call_has_the_record(self):
        given = torch.zeros(4)
        with pytest.raises(RuntimeError) as caught, watch({"k": given}):
            given[2] = 1
            raise RuntimeError("stop")
        assert "kvviz watched this call" in caught.value.__notes__[0] and "2 bytes changed" in caught.value.__notes__[0]

    def test_a_process_that_is_killed_leaves_a_record_of_its_bytes(self, tmp_path):
        shared = np.memmap(tmp_path / "cache", np.uint8, "w+", shape=(4, 8))
        code = f"""
import numpy, os, signal
cache = numpy.memmap({str(tmp_path / "cache")!r}, numpy.uint8, "r+", shape=(4, 8))
cache[1:3] = 7
cache.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
        with (
            pytest.raises(subprocess.CalledProcessError) as caught,
            watch({"k": (shared, ("block", "element"))}) as seen,
        ):
            subprocess.run([sys.executable, "-c", code], check=True)
        assert caught.value.returncode == -9
        assert seen.steps[0].views[0].cells.tolist() == [1, 2] and seen.steps[0].num_changed == 16

    def test_too_little_memory(self, monkeypatch):
        free = SimpleNamespace(available=10)
        monkeypatch.setattr("psutil.virtual_memory", lambda: free)
        with pytest.raises(MemoryError, match=r"a copy of all watched bytes needs 400 bytes on cpu"):
            watch({"k": torch.zeros(100)}).__enter__()
