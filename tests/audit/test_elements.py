"""Elements that cover a byte, and elements at equal places, against an enumeration over random views."""

import random

import numpy as np

from kvviz.audit.elements import first_wrong, locate, same_places
from kvviz.audit.view import View
from tests.audit.random_views import STORAGE, random_set, random_view


def test_locate_finds_the_first_index():
    for seed in range(500):
        for view in random_set(seed):
            starts = view.starts.ravel()
            for byte in random.Random(seed).sample(range(-20, 300), 30):
                covering = np.flatnonzero((starts <= byte) & (byte < starts + view.itemsize))
                want = view.index(int(covering[0])) if len(covering) else None
                assert locate(view, byte) == want, (seed, byte)


def test_places_that_agree_are_counted():
    for seed in range(2000):
        draw = random.Random(seed)
        view = random_view(draw, "v")
        stride = tuple(step + draw.choice((0, 0, 1)) for step in view.stride)
        other = View("w", STORAGE, view.shape, stride, view.offset + draw.choice((0, 0, 1)), view.itemsize)
        equal = view.starts == other.starts
        assert same_places(view, other) == int(equal.sum()), seed
        if view.nested:
            wrong = np.flatnonzero(~equal.ravel())
            first = view.index(int(wrong[np.argmin(view.starts.ravel()[wrong])])) if len(wrong) else None
            assert first_wrong(view, other) == first, seed


def test_the_example_of_elements_that_are_apart():
    view = View("v", STORAGE, (3,), (2,), 0, 4)
    assert locate(view, 10) == (1,) and locate(view, 13) is None
