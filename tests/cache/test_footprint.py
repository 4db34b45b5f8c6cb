"""Predicted and observed bytes: work that writes exactly the predicted bytes, and work that writes other bytes."""

import numpy as np
import pytest
import torch

from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.footprint import FILLS, Comparison, observe, predict
from kvviz.cache.scale_views import kv_halves
from kvviz.cache.spec import CacheSpec

SPEC = CacheSpec(2, 3, 4, 2, 8)
SLOTS = (1, 6, 11)


def write(cache, layers=(0, 1), slots=SLOTS, value=None) -> None:
    """Fill the whole cell of each slot, K and V, with ``value`` or a byte that depends on the slot."""
    for layer in layers:
        for half in kv_halves(cache.kv_caches[layer]):
            for slot in slots:
                half[slot // 4, slot % 4] = slot if value is None else value


def compared(work, layout: str = "NHD", views=None) -> Comparison:
    """Compare the bytes that ``work(cache)`` reaches with the bytes of SLOTS in ``views`` (default: the owners)."""

    def run(fill: int) -> dict[str, torch.Tensor]:
        cache = allocate(SPEC, layout, fill=fill)
        work(cache)
        return cache.storages_by_name()

    views = allocate(SPEC, layout, "meta").owners() if views is None else views
    return Comparison(predict(views, SLOTS), observe(run))


@pytest.mark.parametrize("layout", ["NHD", "HND", "cross-layer NHD", "cross-layer HND", "LHBNC", "BHLNC"])
def test_predicted_bytes_are_those_of_the_slots(layout):
    cache = allocate(SPEC, layout)
    write(cache, value=1)
    predicted = predict(cache.owners(), SLOTS)
    assert {name: mask.tolist() for name, mask in predicted.items()} == {
        name: storage.bool().tolist() for name, storage in cache.storages_by_name().items()
    }
    assert sum(int(mask.sum()) for mask in predicted.values()) == 2 * 3 * 2 * 2 * SPEC.cell_bytes


def test_negative_slots_and_no_slots_predict_nothing():
    owners = allocate(SPEC, "NHD", "meta").owners()
    for slots in ([], [-1, -7]):
        assert not any(mask.any() for mask in predict(owners, slots).values())
    few, padded = predict(owners, [5]), predict(owners, [-1, 5, -3])
    assert all(np.array_equal(few[name], padded[name]) for name in few)


@pytest.mark.parametrize("axes", [(), ("token", "block"), ("block", "head")])
def test_a_view_needs_blocks_and_tokens_in_front(axes):
    view = View("odd", Storage("cache", 99), (2, 2), (2, 1), axes=axes)
    with pytest.raises(ValueError, match="odd has the axes"):
        predict([view], [0])


def test_a_byte_cannot_hide_behind_the_value_it_had():
    for value in (*FILLS, 0x5A):
        seen = observe(lambda fill, value=value: {"s": torch.tensor([fill, value, fill], dtype=torch.uint8)})
        assert seen["s"].tolist() == [False, True, False]


@pytest.mark.parametrize("slots", [[1.5], [True, False], ["1"]], ids=repr)
def test_slots_are_integers(slots):
    with pytest.raises(ValueError, match="slots must be integers"):
        predict(allocate(SPEC, "NHD", "meta").owners(), slots)


def test_slots_may_be_numpy_integers():
    owners = allocate(SPEC, "NHD", "meta").owners()
    for slots in ([np.int64(1), np.int32(6)], np.array([1, 6, -1], np.int16)):
        few, plain = predict(owners, slots), predict(owners, [1, 6])
        assert all(np.array_equal(few[name], plain[name]) for name in plain)


def test_a_meta_tensor_cannot_be_observed():
    with pytest.raises(ValueError, match="storage 'layer 0' is a meta tensor, which has no bytes"):
        observe(lambda fill: allocate(SPEC, "NHD", "meta", fill=fill).storages_by_name())


def test_both_fillings_are_run_once():
    calls = []
    observe(lambda fill: calls.append(fill) or {})
    assert calls == [0x00, 0xFF]


@pytest.mark.parametrize("layout", ["NHD", "cross-layer HND", "BLNHC"])
def test_a_run_that_does_as_its_views_say_is_equal(layout):
    result = compared(write, layout)
    assert result.equal and (result.unpredicted, result.unreached) == (0, 0)
    assert str(result) == (
        "288 bytes predicted, 288 observed: 0 observed but not predicted, 0 predicted but not observed"
    )


@pytest.mark.parametrize("layout", ["NHD", "cross-layer NHD"])
def test_a_run_that_writes_one_more_byte_is_caught(layout):
    def work(cache):
        write(cache)
        kv_halves(cache.kv_caches[1])[0][0, 0, 0, 0] = 7

    result = compared(work, layout)
    assert (result.unpredicted, result.unreached, result.equal) == (1, 0, False)
    assert "289 observed: 1 observed but not predicted" in str(result)


def test_a_run_that_writes_another_slot_is_caught():
    result = compared(lambda cache: write(cache, slots=(1, 6, 10)))
    assert (result.unpredicted, result.unreached) == (2 * 2 * 2 * SPEC.cell_bytes,) * 2


def test_a_run_that_writes_less_is_caught():
    result = compared(lambda cache: write(cache, slots=SLOTS[:2]))
    assert (result.unpredicted, result.unreached) == (0, 2 * 2 * 2 * SPEC.cell_bytes)
    assert not result.equal and "96 predicted but not observed" in str(result)


def test_a_storage_that_no_view_names_is_not_overlooked():
    views = [view for view in allocate(SPEC, "NHD", "meta").owners() if "layer 0" in view.name]
    result = compared(write, "NHD", views)
    assert (result.unpredicted, result.unreached, result.equal) == (144, 0, False)


def test_a_storage_that_the_run_does_not_return_is_unreached():
    views = allocate(SPEC, "NHD", "meta").owners()
    result = Comparison(predict(views, SLOTS), {})
    assert (result.unpredicted, result.unreached, result.equal) == (0, 288, False)


def test_scales_carved_from_the_shape_collide_and_are_foretold():
    """The scales of both layers have the same addresses, so 48 bytes are written and not 96. They are all predicted."""

    def run(fill: int) -> dict[str, torch.Tensor]:
        cache = allocate(SPEC, "cross-layer NHD", fill=fill)
        for pair in cache.carve_scales("shape"):
            for scale in pair:
                for slot in SLOTS:
                    scale[slot // 4, slot % 4] = 0.5
        return cache.storages_by_name()

    cache = allocate(SPEC, "cross-layer NHD", "meta")
    by_name = {carve: predict(cache.writers(cache.carve_scales(carve)), SLOTS) for carve in ("shape", "strides")}
    assert [int(by_name[carve]["cache"].sum()) for carve in ("shape", "strides")] == [48, 96]
    seen = observe(run)
    assert Comparison(by_name["shape"], seen).equal
    assert not Comparison(by_name["strides"], seen).equal
