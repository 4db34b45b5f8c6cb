"""Tests of the dye: every fault of a mover is named, no sound transfer is blamed, and all bytes are restored."""

import json
import threading
import time

import numpy as np
import pytest
import torch

from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec
from kvviz.engine.block_pool import BlockPool
from kvviz.engine.offload import Offloader
from kvviz.trace.dye import KINDS, Dye, Move
from kvviz.trace.memory import memory_of
from kvviz.trace.palette import Palette, mix, unmix
from tests.trace.movers import FAULTS, memory, move, parts, random_case

SPEC = CacheSpec(2, 5, 2, 2, 16, "int8_per_token_head")
AXES = ("block", "token", "head", "byte")


def pair(layout: str = "cross-layer NHD", spec: CacheSpec = SPEC):
    return allocate(spec, layout), allocate(spec, layout)


def carried(source, target, blocks, fault="", other=None):
    """Fill the caches with known bytes, dye and move. Check that all bytes are restored. Return what arrived."""
    processes = {"sender": memory(source), "receiver": memory(target)}
    if other is not None:
        processes["other rank"] = memory(other)
    flats = [flat for one in processes.values() for flat in one.flats.values()]
    for number, flat in enumerate(flats):
        flat.copy_(torch.arange(number, number + flat.numel()) % 251)
    before = [flat.clone() for flat in flats]
    arrival = Dye(processes).carry(
        lambda number: move(source, target, blocks, fault, other), "receiver", [Move("sender", blocks)]
    )
    assert all(torch.equal(flat, old) for flat, old in zip(flats, before, strict=True))
    return arrival


class TestNumbers:
    def test_mixing_can_be_undone(self):
        numbers = np.concatenate([np.arange(4096), 2 ** np.arange(63)]).astype(np.uint64)
        assert (unmix(mix(numbers)) == numbers).all()

    def test_two_halves_of_different_numbers_show_no_cell(self):
        low, high = mix(np.arange(2000, dtype=np.uint64))[:, None], mix(np.arange(2000, dtype=np.uint64))[None, :]
        mask = np.uint64(0xFFFFFFFF)
        torn = unmix((low & mask) | (high & ~mask))
        assert ((torn < 2000) == np.eye(2000, dtype=bool)).all()

    @pytest.mark.parametrize(
        ("itemsize", "size", "passes"), [(1, 16, 1), (1, 4, 2), (2, 1, 4), (1, 3, 8), (4, 1, 2), (8, 1, 1)]
    )
    def test_small_cells_need_more_passes(self, itemsize, size, passes):
        view = View("k", Storage("s", 6 * size * itemsize), (3, 1, 2, size), (2 * size, 9, size, 1), 0, itemsize, AXES)
        palette, flat = Palette({"a": [view]}), torch.zeros(6 * size * itemsize, dtype=torch.uint8)
        held, one = memory_of([view], {"s": flat}), palette.swatches["a"]["k"]
        seen = []
        for number in range(palette.passes):
            palette.paint("a", held, number)
            seen.append(palette.read(one, held).copy())
        assert (palette.passes, one.per_cell) == (passes, size * itemsize // palette.mark_bytes)
        assert palette.numbers(seen).tolist() == list(range(one.count))


class TestSound:
    @pytest.mark.parametrize("seed", range(40))
    def test_a_sound_transfer_is_clean(self, seed):
        source, target, blocks = random_case(seed)
        arrival = carried(source, target, blocks)
        assert arrival.clean, str(arrival)
        content = source.spec.num_layers * source.spec.content_page_size_bytes
        assert arrival.moved_bytes == len(blocks) * content and str(arrival).startswith("clean: ")

    @pytest.mark.slow
    def test_two_thousand_sound_transfers_are_clean(self):
        alarms = [seed for seed in range(2000) if not carried(*random_case(seed)).clean]
        assert alarms == []


class TestFaults:
    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.parametrize("layout", ["NHD", "cross-layer NHD", "BHLNC"])
    def test_the_kind_and_the_cells_are_named(self, fault, layout):
        source, target = pair(layout)
        arrival = carried(source, target, {3: 1, 0: 4}, fault, allocate(SPEC, layout))
        groups, views = {one.kind: one for one in arrival.groups}, SPEC.num_layers * 4
        text = str(arrival)
        if fault == "one page short":
            assert set(groups) == {"stale"} and groups["stale"].cells == 4 * 4
            assert groups["stale"].views == tuple(f"layer 1 {h} {r}" for r in ("data", "scale") for h in "KV")
            assert "receiver: layer 1 K data [block 1, token 0, head 0] has receiver: layer 1 K data [block 1," in text
        elif fault == "one block id off":
            assert set(groups) == {"stale", "permuted"} and len(groups["permuted"].views) == views
            assert "receiver: layer 0 K data [block 2, token 0, head 0] has sender: layer 0 K data [block 3," in text
        elif fault == "scales left behind":
            assert set(groups) == {"stale"}
            assert {v.split()[-1] for one in arrival.groups for v in one.views} == {"scale"}
        elif fault == "K and V swapped":
            assert set(groups) == {"permuted"} and sum(one.cells for one in arrival.groups) == views * 2 * 4
            assert "receiver: layer 0 K data [block 1, token 0, head 0] has sender: layer 0 V data [block 3," in text
        elif fault == "another rank's shard":
            assert set(groups) == {"foreign"}
            assert "has other rank: layer 0 K data [block 3, token 0, head 0], and should have sender: " in text
        elif fault == "half of a cell":
            assert set(groups) == {"truncated"} and groups["truncated"].nbytes == 4 * 4 * 8
        else:
            assert (
                set(groups) == {"duplicated"}
                and "[block 4, token 0, head 0] has sender: layer 0 K data [block 3," in text
            )

    def test_bytes_of_nobody_are_foreign(self):
        source, target = pair()

        def noise(number):
            move(source, target, {3: 1})
            parts(target)["layer 1 V data"][1, 0, 0, :4] = 77

        arrival = Dye({"a": memory(source), "b": memory(target)}).carry(noise, "b", [Move("a", {3: 1})])
        (one,) = arrival.groups
        assert (one.kind, one.cells, one.nbytes, one.source) == ("foreign", 1, 4, "bytes that show no cell")

    def test_unequal_tensor_parallel_sizes(self):
        """Two ranks with two heads each send to one process with four heads."""
        ranks = [allocate(SPEC, "LBHNC") for _ in range(2)]
        whole = allocate(CacheSpec(2, 5, 2, 4, 16, "int8_per_token_head"), "cross-layer NHD")
        dyed = Dye({"rank 0": memory(ranks[0]), "rank 1": memory(ranks[1]), "whole": memory(whole)})
        moves = [Move(f"rank {rank}", {2: 0}, heads={0: 2 * rank, 1: 2 * rank + 1}) for rank in range(2)]

        def mover(order):
            def gather(number):
                for name, there in parts(whole).items():
                    for at, rank in enumerate(order):
                        there[0][:, 2 * at : 2 * at + 2] = parts(ranks[rank])[name][2]

            return gather

        assert dyed.carry(mover([0, 1]), "whole", moves).clean
        wrong = dyed.carry(mover([1, 0]), "whole", moves)
        assert {one.kind for one in wrong.groups} == {"permuted"} and len(wrong.groups) == 2
        with pytest.raises(ValueError, match=r"axis 2 \(head\) has 2 marks in layer 0 K data of rank 0, but 4"):
            dyed.carry(mover([0, 1]), "whole", [Move("rank 0", {2: 0})])

    def test_a_receiver_that_reads_through_wrong_views(self):
        """All bytes arrive, but the scale views of the receiver are carved from the shape."""
        source, target = pair("cross-layer NHD")
        dyed = Dye({"a": memory(source), "b": memory(target)})
        moves, blocks = [Move("a", {3: 1})], {3: 1}
        for carve, clean in (("strides", True), ("shape", False)):
            views = target.writers(target.carve_scales(carve))
            arrival = dyed.carry(lambda number: move(source, target, blocks), "b", moves, through=views)
            assert arrival.clean == clean
        assert all(name.endswith("scale") for one in arrival.groups for name in one.views)

    def test_store_forget_restore(self):
        """Blocks go to host memory and come back in other blocks of one cache, with the right and a wrong width."""
        cache = allocate(SPEC, "cross-layer NHD")
        for width, clean in ((SPEC.content_page_size_bytes, True), (SPEC.real_page_size_bytes, False)):
            per_layer = allocate(SPEC, "NHD")
            for one in (cache, per_layer):
                pool = BlockPool(SPEC.num_blocks)
                offloader = Offloader(one, pool, 4, width_bytes=width, check_width=False)

                def store_and_restore(number, pool=pool, offloader=offloader):
                    keys = [f"{number} {at}" for at in range(2)]
                    offloader.store(keys, [0, 1]).wait()
                    offloader.restore(keys, [3, 4]).wait()
                    for block in (3, 4):
                        pool.forget(block)
                    offloader.drop(keys)

                arrival = Dye({"cache": memory(one)}).carry(store_and_restore, "cache", [Move("cache", {0: 3, 1: 4})])
                assert arrival.clean == clean, str(arrival)
                assert {group.kind for group in arrival.groups} <= {"stale", "truncated"}

    def test_another_process_can_paint(self):
        """This process knows only the views of the sender. The mover stands for the process that paints."""
        source, target = pair()
        theirs = memory(source)
        palette = Palette({"a": source.owners(), "b": target.owners()})

        def mover(number):
            palette.paint("a", theirs, number)
            move(source, target, {0: 0})

        dyed = Dye({"a": source.owners(), "b": memory(target)})
        assert list(dyed.memories) == ["b"] and dyed.carry(mover, "b", [Move("a", {0: 0})]).clean


class TestRecords:
    def test_json_text_and_map_say_the_same(self):
        source, target = pair()
        arrival = carried(source, target, {3: 1}, "one page short")
        data = json.loads(json.dumps(arrival.as_data()))
        (one,) = data["groups"]
        assert (one["kind"], one["cells"], one["nbytes"]) == ("stale", 16, 8 * 16 + 8 * 4)
        shown = arrival.map()
        wrong = {title: plane.count(255) for title, plane in shown.frames}
        assert wrong == dict.fromkeys(KINDS, 0) | {"stale": one["nbytes"]}
        view = next(v for v in target.owners() if v.name == "layer 1 K data")
        assert dict(shown.frames)["stale"][view.start_of((1, 0, 0, 0))] == 255 and "stale" in shown.html

    def test_a_clean_map_has_no_wrong_byte(self):
        source, target = pair()
        assert not any(any(plane) for _, plane in carried(source, target, {3: 1}).map(window=(0, 100)).frames)


class TestBadInput:
    def dyed(self):
        source, target = pair()
        for one in (source, target):
            one.storages[0].fill_(7)
        return source, target, Dye({"a": memory(source), "b": memory(target)})

    def unchanged(self, *caches):
        return all((flat == 7).all() for cache in caches for flat in cache.storages)

    def test_a_mover_that_fails(self):
        source, target, dyed = self.dyed()

        def fails(number):
            move(source, target, {0: 0})
            raise OSError("connection lost")

        with pytest.raises(OSError, match="connection lost") as caught:
            dyed.carry(fails, "b", [Move("a", {0: 0})])
        assert "failed in pass 1 of 2. All dyed bytes were restored" in caught.value.__notes__[0]
        assert self.unchanged(source, target)

    def test_a_mover_that_never_returns(self):
        source, target, dyed = self.dyed()
        end = threading.Event()
        begin = time.perf_counter()
        with pytest.raises(TimeoutError, match=r"did not return within 0.2 s, in pass 1 of 2.*may write into them"):
            dyed.carry(lambda number: end.wait(60), "b", [Move("a", {0: 0})], limit_s=0.2)
        end.set()
        assert time.perf_counter() - begin < 30 and self.unchanged(source, target)

    def test_a_mover_in_the_callers_thread(self):
        source, target, dyed = self.dyed()
        with pytest.raises(KeyboardInterrupt):
            dyed.carry(lambda number: (_ for _ in ()).throw(KeyboardInterrupt), "b", [Move("a", {0: 0})], limit_s=None)
        assert self.unchanged(source, target)

    def test_views_that_overlap(self):
        cache = allocate(SPEC, "cross-layer NHD")
        data = [view for view in cache.owners() if view.role == "data"]
        views = [*data, *cache.writers(cache.carve_scales("shape"))]
        with pytest.raises(ValueError, match=r"b: views share bytes.*layer \d . \w+ \[block .*through=views"):
            Dye({"b": memory_of(views, cache.storages_by_name())})

    @pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
    def test_read_only_memory(self, tmp_path):
        array = np.zeros((2, 8), np.uint8)
        array.flags.writeable = False
        with pytest.raises(ValueError, match="k is read-only, but dye writes into every cell"):
            Dye({"a": {"k": (array, ("block", "byte"))}})
        (tmp_path / "cache").write_bytes(bytes(8192))
        mapped = np.memmap(tmp_path / "cache", np.uint8, "r", shape=(2, 4096))
        view = View("k", Storage("s", 8192), (2, 4096), (4096, 1), axes=("block", "byte"))
        flat = torch.from_numpy(np.asarray(mapped)).view(-1)
        with pytest.raises(ValueError, match="the memory of s is mapped read-only"):
            Dye({"a": memory_of([view], {"s": flat})})

    def test_shared_memory_gets_a_warning(self, tmp_path):
        shared = np.memmap(tmp_path / "cache", np.uint8, "w+", shape=(2, 4096))
        with pytest.warns(UserWarning, match="if this process is killed before that, the memory keeps the dye"):
            Dye({"a": {"k": (shared, ("block", "byte"))}})

    @pytest.mark.parametrize(
        ("move", "message"),
        [
            (Move("c", {0: 0}), "the source of a move 'c' does not exist: it is one of a, b"),
            (Move("a", {0: 9}), "a move takes block 0 to block 9, but there are 5 and 5"),
            (Move("a", {0: 0}, views={"k": "k"}), "view of a 'k' does not exist"),
        ],
    )
    def test_a_move_that_cannot_be(self, move, message):
        source, target, dyed = self.dyed()
        with pytest.raises(ValueError, match=message):
            dyed.carry(print, "b", [move])
        assert self.unchanged(source, target)

    def test_other_arguments(self):
        _, target, dyed = self.dyed()
        with pytest.raises(ValueError, match="to 'c' does not exist"):
            dyed.carry(print, "c", [])
        with pytest.raises(ValueError, match="mark_bytes is 8, but the rows of these views have marks of 1 to 4 bytes"):
            Dye({"b": memory(target)}, mark_bytes=8)
        with pytest.raises(ValueError, match="one of them must have the name 'block'"):
            Dye({"b": {"k": torch.zeros(4)}})
        with pytest.raises(ValueError, match="through has the view 'x'"):
            dyed.carry(print, "b", [], through=[View("x", Storage("s", 1), (1,), (1,))])
