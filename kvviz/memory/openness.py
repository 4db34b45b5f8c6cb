"""Between the starts and stops of runs: which lanes are open there, and how many elements lie there."""

import numpy as np

WORD = 62
"""Lanes whose openness one number tells."""


def touched_elements(points: np.ndarray, sizes: np.ndarray, itemsize: int, groups: np.ndarray) -> list[int]:
    """Elements of ``itemsize`` bytes that the intervals of each group touch; groups begin at the given positions."""
    first, last = points // itemsize, (points + sizes - 1) // itemsize
    count = last - first + 1
    count[1:] -= first[1:] == last[:-1]
    count[groups[1:]] += first[groups[1:]] == last[groups[1:] - 1]
    return np.add.reduceat(count, groups).tolist()


def distinct_rows(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of a table of integers, and the number of each row's."""
    number = None
    for column in words.T:
        values, codes = np.unique(column, return_inverse=True)
        if number is not None:
            _, codes = np.unique(number * len(values) + codes, return_inverse=True)
        number = codes
    _, first = np.unique(number, return_index=True)
    return words[first], number


def open_lanes(flips: np.ndarray, count: int, picked: np.ndarray) -> np.ndarray:
    """Which of ``count`` lanes are open after each picked event, as bits in words: each event flips its lane's bit."""
    words = []
    for first in range(0, count, WORD):
        bits = np.zeros(count, np.int64)
        bits[first : first + WORD] = np.int64(1) << np.arange(min(WORD, count - first))
        words.append(np.bitwise_xor.accumulate(bits[flips])[picked])
    return np.stack(words, axis=1)


def set_bits(words: np.ndarray) -> tuple[int, ...]:
    """The numbers of the lanes that a row of words calls open."""
    found = []
    for number, word in enumerate(words.tolist()):
        while word:
            found.append(number * WORD + (word & -word).bit_length() - 1)
            word &= word - 1
    return tuple(found)
