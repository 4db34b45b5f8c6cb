"""The probe that names the first write of a layer into another layer, on small layers of our own."""

import json

import torch

from kvviz.bench.foreign_write import RECORD, RELEASES, probe
from kvviz.bench.prediction import version
from tests.test_notebooks import FOLDER


class Layer:
    """A layer whose write sets its own bytes, and bytes at ``foreign`` too."""

    def __init__(self, buffer, number, foreign=()):
        self.kv_cache = [buffer[:, number]]
        self.buffer, self.number, self.foreign = buffer, number, foreign
        self.impl = Impl(self)


class Impl:
    def __init__(self, layer):
        self.layer = layer

    def do_kv_cache_update(self, value):
        self.layer.kv_cache[0][1] = value
        for at in self.layer.foreign:
            self.layer.buffer.view(-1)[at] = value


def answer(layers):
    def generate():
        for value in (1, 2):  # two forward passes
            for number, layer in enumerate(layers.values()):
                layer.impl.do_kv_cache_update(value + 2 * number)
        return "text"

    return generate


def test_the_first_foreign_write_is_named():
    buffer = torch.zeros(3, 2, 8, dtype=torch.uint8)
    layers = {"a": Layer(buffer, 0), "b": Layer(buffer, 1, foreign=(3, 40))}
    found = probe(answer(layers), layers)
    assert (found["launches"], found["foreign_bytes"]) == (2, 1)  # byte 40 belongs to b itself
    assert (found["first"]["launch"], found["first"]["layer"], found["first"]["byte"]) == (1, "b", 3)
    assert found["first"]["text"].startswith("a [axis 0 0")
    assert all("do_kv_cache_update" not in vars(layer.impl) for layer in layers.values())


def test_layers_that_keep_to_their_own_bytes():
    buffer = torch.zeros(3, 2, 8, dtype=torch.uint8)
    layers = {"a": Layer(buffer, 0), "b": Layer(buffer, 1)}
    assert probe(answer(layers), layers) == {"launches": 2, "first": None, "foreign_bytes": 0}


def test_the_record_has_both_releases():
    runs = json.loads((FOLDER / RECORD.name).read_text())["runs"]
    assert tuple(runs) == RELEASES == tuple(sorted(RELEASES, key=version))
    assert runs["0.25.1"]["first"] and not runs["0.26.0"]["first"]
