"""Counts of solutions, compared with an enumeration; some products of coefficients need more than 64 bits."""

import random
from itertools import product

import numpy as np
import pytest

from kvviz.audit.budget import TooMuchWorkError
from kvviz.audit.counting import count_congruent, count_solutions, pair_solutions


def listed(dims) -> list[int]:
    return [
        sum(c * i for (c, _), i in zip(dims, index, strict=True)) for index in product(*(range(n) for _, n in dims))
    ]


def random_dims(draw: random.Random, largest: int) -> list[tuple[int, int]]:
    return [(draw.randint(-largest, largest), draw.randint(1, 6)) for _ in range(draw.randint(1, 4))]


@pytest.mark.parametrize("largest", [3, 12, 1 << 20, 1 << 33, 1 << 45, 1 << 59])
def test_solutions_are_those_of_the_enumeration(largest):
    for seed in range(300):
        draw = random.Random(seed)
        dims = random_dims(draw, largest)
        values = listed(dims)
        for target in (draw.choice(values), draw.choice(values) + draw.choice((-1, 1, 2)), draw.randint(-9, 9)):
            assert count_solutions(dims, target) == values.count(target), (seed, dims, target)


def test_two_long_coefficients_with_one_of_many_indices():
    """One index has 681025926693 values. The products exceed 64 bits, so Python integers solve the equation."""
    c, d, target = 5, -167_033_083_024, 1_324_135_859_470
    by_hand = sum((target - d * y) % c == 0 and 0 <= (target - d * y) // c < 681_025_926_693 for y in range(2))
    assert count_solutions([(c, 681_025_926_693), (d, 2)], target) == by_hand == 1
    draw = random.Random(0)
    for _ in range(500):
        c, d = draw.choice((1, 3, 5, 1 << 33)), draw.choice((-1, 1)) * draw.randrange(1 << 31, 1 << 39)
        n, m = draw.randrange(1 << 22, 1 << 24), draw.randint(2, 5)
        target = c * draw.randrange(n) + d * draw.randrange(m) + draw.choice((0, 0, 1))
        want = sum((target - d * y) % c == 0 and 0 <= (target - d * y) // c < n for y in range(m))
        assert count_solutions([(c, n), (d, m)], target) == want


@pytest.mark.parametrize("largest", [3, 12, 1 << 20, 1 << 45, 1 << 59])
def test_residues_are_those_of_the_enumeration(largest):
    for seed in range(300):
        draw = random.Random(seed)
        dims = random_dims(draw, largest)
        values = listed(dims)
        for modulus in (1, 2, 8, 12, 30, 1 << 21, largest * 2 + 1):
            target = draw.choice((draw.choice(values), draw.randrange(modulus)))
            want = sum((value - target) % modulus == 0 for value in values)
            assert count_congruent(dims, target, modulus) == want, (seed, dims, target, modulus)


def test_no_index_no_solution():
    assert count_solutions([(1, 3), (2, 0)], 0) == count_congruent([(1, 3), (2, 0)], 0, 7) == 0
    assert count_solutions([], 0) == count_congruent([], 0, 7) == 1


def test_equations_too_wide_are_refused():
    with pytest.raises(TooMuchWorkError, match="needs more than"):
        count_solutions([(3, 1000), (5, 1000), (7, 1000), (11, 1000)], 100, budget=1000)
    with pytest.raises(TooMuchWorkError, match="need more than 1000 cases"):
        count_congruent([(3, 100), (5, 100), (7, 100)], 100, 1 << 30, budget=1000)


def test_the_examples_of_the_docstrings():
    assert count_solutions([(3, 6), (5, 4)], 15) == 2
    assert pair_solutions(np.array([2, 3]), (6, 6), (4, 5)).tolist() == [2, 0]
    assert count_congruent([(4, 10)], 0, 6) == 4
