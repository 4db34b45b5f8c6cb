"""Random sets of small views for tests, many of them with overlapping elements."""

import random

from kvviz.audit.view import Storage, View

STORAGE = Storage("s", 4096)


def random_view(draw: random.Random, name: str) -> View:
    """Return a view: 6 of 10 have gaps and no overlapping elements, the others have any strides."""
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 5)))
    if draw.random() < 0.6:
        order, stride, step = draw.sample(range(len(shape)), len(shape)), [0] * len(shape), 1
        for axis in order:
            step += draw.choice((0, 0, 0, 1, 3))
            stride[axis] = step
            step *= shape[axis]
    else:
        stride = [draw.randint(-6, 12) for _ in shape]
    return View(name, STORAGE, shape, tuple(stride), draw.randint(0, 30), draw.choice((1, 1, 2, 4)))


def random_set(seed: int) -> list[View]:
    draw = random.Random(seed)
    views = [random_view(draw, f"v{n}") for n in range(draw.randint(2, 4))]
    if draw.random() < 0.2:  # an overlay of the very same bytes
        first = views[0]
        views.append(View("twin", STORAGE, first.shape, first.stride, first.offset, first.itemsize))
    return [view for view in views if view.num_elements <= 600]
