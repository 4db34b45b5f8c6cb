"""Device functions that make the operands of tensor cores from queries, words of the cache and weights.

A tensor core takes 16-bit numbers. To keep more bits, each number of a query is passed as the sum of two 16-bit
numbers, *high* and *low*, which are stacked in one operand. Weights are passed in the same way. This keeps 22 bits of
float32, or 16 bits with bfloat16. It takes little time, because the operand has empty columns if a KV head has few
query heads.

The cache is read in *words* of 16 bits, with ``PER_WORD`` codes each: 1, 2 or 4. Column ``PER_WORD * w + c`` of a cell
is code c of word w. Therefore data with one value per column is a tuple of tensors, one per c.

ROWS is the number of rows of a program. A row is one query of one query head. NARROW is the 16-bit type of the operands
(float32 in the interpreter and on older GPUs, which do not use tensor cores here).
"""

from kvviz.kernels.codec import device_function, tl


@device_function
def stacked(x, LENGTH: tl.constexpr, ROWS: tl.constexpr, NARROW: tl.constexpr):
    """Turn float32 (LENGTH, ROWS) into 16-bit numbers (LENGTH, 2 * ROWS).

    The first ROWS columns are the nearest 16-bit numbers (high). The last ROWS columns are the differences (low).
    """
    high = x.to(NARROW)
    low = (x - high.to(tl.float32)).to(NARROW)
    return tl.reshape(tl.permute(tl.join(high, low), (0, 2, 1)), (LENGTH, 2 * ROWS))


@device_function
def split_columns(x, ROWS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr):
    """Split (ROWS, PER_WORD * WIDE) into PER_WORD tensors (ROWS, WIDE): tensor c has the columns PER_WORD * w + c."""
    if PER_WORD == 1:
        return (x,)
    elif PER_WORD == 2:
        return tl.split(tl.reshape(x, (ROWS, WIDE, 2)))
    elif PER_WORD == 4:
        even, odd = tl.split(tl.reshape(x, (ROWS, WIDE, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth
    else:
        tl.static_assert(False, "a word of 16 bits holds 1, 2 or 4 codes")


@device_function
def joined_columns(x, ROWS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr):
    """Join the tensors of :func:`split_columns` to (ROWS, PER_WORD * WIDE)."""
    if PER_WORD == 1:
        return x[0]
    elif PER_WORD == 2:
        return tl.reshape(tl.join(x[0], x[1]), (ROWS, 2 * WIDE))
    elif PER_WORD == 4:
        return tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), (ROWS, 4 * WIDE))
    else:
        tl.static_assert(False, "a word of 16 bits holds 1, 2 or 4 codes")


@device_function
def load_words(base, cell, WORDS: tl.constexpr, WIDE: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr):
    """Load the words of TILE cells: int16 (TILE, WIDE), with zeros from column WORDS on.

    The load has shape (WIDE / 16, TILE, 16). Triton then spreads eight rows over the threads of a warp, four threads
    per row. A tensor core needs its operand in this form.
    """
    chunk, word = tl.arange(0, WIDE // 16)[:, None, None] * 16, tl.arange(0, 16)[None, None, :]
    place = tl.multiple_of(base + cell, [BYTES])[None, :, None] + (chunk + word)
    if WORDS == WIDE:
        words = tl.load(place)
    else:
        words = tl.load(place, mask=tl.broadcast_to(chunk + word < WORDS, place.shape), other=0)
    return tl.reshape(tl.permute(words, (1, 0, 2)), (TILE, WIDE))


@device_function
def query_operands(x, ROWS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr, NARROW: tl.constexpr):
    """Turn queries (ROWS, PER_WORD * WIDE) into PER_WORD operands (WIDE, 2 * ROWS): split, transposed and stacked."""
    operands, columns = (), split_columns(x, ROWS, WIDE, PER_WORD)
    for c in tl.static_range(PER_WORD):
        operands = operands + (stacked(tl.trans(columns[c]), WIDE, ROWS, NARROW),)
    return operands


@device_function
def dot_scores(queries, keys, ROWS: tl.constexpr, TILE: tl.constexpr, PER_WORD: tl.constexpr):
    """Compute the dot products of keys and stacked queries: float32 (TILE, ROWS), summed over all columns."""
    scores = tl.full((TILE, 2 * ROWS), 0.0, tl.float32)
    for c in tl.static_range(PER_WORD):
        scores = tl.dot(keys[c], queries[c], scores, input_precision="ieee")
    return tl.sum(tl.reshape(scores, (TILE, 2, ROWS)), axis=1)


@device_function
def zero_sums(ROWS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr):
    """Make the sums of values, with all sums 0: PER_WORD tensors (WIDE, 2 * ROWS)."""
    out = ()
    for _ in tl.static_range(PER_WORD):
        out = out + (tl.full((WIDE, 2 * ROWS), 0.0, tl.float32),)
    return out


@device_function
def multiplied_sums(sums, factor, ROWS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr):
    """Multiply the sums of each row, in the high and the low column, by ``factor`` (ROWS,)."""
    out = ()
    for c in tl.static_range(PER_WORD):
        pair = tl.reshape(sums[c], (WIDE, 2, ROWS)) * factor[None, None, :]
        out = out + (tl.reshape(pair, (WIDE, 2 * ROWS)),)
    return out


@device_function
def added_values(sums, weights, values, PER_WORD: tl.constexpr):
    """Add the values of a tile to the sums; ``weights`` are stacked, (TILE, 2 * ROWS)."""
    out = ()
    for c in tl.static_range(PER_WORD):
        out = out + (tl.dot(tl.trans(values[c]), weights, sums[c], input_precision="ieee"),)
    return out


@device_function
def joined_sums(sums, ROWS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr):
    """Add the high and the low column of each row, and join the sums to (ROWS, PER_WORD * WIDE)."""
    out = ()
    for c in tl.static_range(PER_WORD):
        out = out + (tl.trans(tl.sum(tl.reshape(sums[c], (WIDE, 2, ROWS)), axis=1)),)
    return joined_columns(out, ROWS, WIDE, PER_WORD)
