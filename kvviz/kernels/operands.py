"""Functions that make the operands of tensor cores. The operands are queries, weights and words of the cache.

A tensor core multiplies 16-bit floats. To keep more bits, each number of a query is passed as the sum of two 16-bit
floats. They are called *high* and *low*, and lie in different rows of one operand. Weights are passed in the same
way. With float16 this keeps 22 bits of a number, and with bfloat16 it keeps 16 bits. It often takes no extra time,
because the operand has empty rows if a KV head has few query heads.

The cache is read in *words* of 16 bits. A word contains ``PER_WORD`` codes, which is 1, 2 or 4. Code c of word w is
column ``PER_WORD * w + c`` of a cell. So a value per column is stored in a tuple of PER_WORD tensors. Tensor c of the
tuple has the values for code c of each word.

ROWS is the number of rows of a program. A row is one query of one query head. WIDE is the number of words of a cell,
rounded up to a power of two. NARROW is the type of the operands. It is a 16-bit float on GPUs of sm_89 and later. The
interpreter and older GPUs use no tensor cores here, so NARROW is float32 there.
"""

from kvviz.kernels.codec import device_function, tl


@device_function
def stacked(x, LENGTH: tl.constexpr, ROWS: tl.constexpr, NARROW: tl.constexpr):
    """Convert float32 of shape (ROWS, LENGTH) to NARROW. The result has shape (2 * ROWS, LENGTH).

    The first ROWS rows are the rounded numbers (high). The other rows are the rounding errors (low).
    """
    high = x.to(NARROW)
    low = (x - high.to(tl.float32)).to(NARROW)
    return tl.reshape(tl.permute(tl.join(high, low), (2, 0, 1)), (2 * ROWS, LENGTH))


@device_function
def split_columns(x, ROWS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr):
    """Split a tensor of shape (ROWS, PER_WORD * WIDE) into PER_WORD tensors of shape (ROWS, WIDE).

    Tensor c gets the columns c, c + PER_WORD, c + 2 * PER_WORD, and so on.
    """
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
    """Undo :func:`split_columns`. The result has shape (ROWS, PER_WORD * WIDE)."""
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
    """Load the WORDS words of each of TILE cells, as int16 of shape (TILE, WIDE). The columns from WORDS on are 0."""
    word = tl.arange(0, WIDE)[None, :]
    place = tl.multiple_of(base + cell, [BYTES])[:, None] + word
    if WORDS == WIDE:
        return tl.load(place)
    else:
        return tl.load(place, mask=tl.broadcast_to(word < WORDS, place.shape), other=0)


@device_function
def query_operands(x, ROWS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr, NARROW: tl.constexpr):
    """Make operands from queries of shape (ROWS, PER_WORD * WIDE): split the columns, and stack.

    The result is a tuple of PER_WORD tensors of shape (2 * ROWS, WIDE).
    """
    operands, columns = (), split_columns(x, ROWS, WIDE, PER_WORD)
    for c in tl.static_range(PER_WORD):
        operands = operands + (stacked(columns[c], WIDE, ROWS, NARROW),)
    return operands


@device_function
def dot_scores(queries, keys, ROWS: tl.constexpr, TILE: tl.constexpr, PER_WORD: tl.constexpr):
    """Compute the dot products of the queries and the keys. The result is float32 of shape (ROWS, TILE).

    ``keys`` are the decoded words of a tile. ``queries`` are the result of :func:`query_operands`.
    """
    scores = tl.full((2 * ROWS, TILE), 0.0, tl.float32)
    for c in tl.static_range(PER_WORD):
        scores = tl.dot(queries[c], tl.trans(keys[c]), scores, input_precision="ieee")
    return tl.sum(tl.reshape(scores, (2, ROWS, TILE)), axis=0)


@device_function
def zero_sums(ROWS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr):
    """Return the sums before the first tile: a tuple of PER_WORD tensors of zeros, of shape (2 * ROWS, WIDE)."""
    out = ()
    for _ in tl.static_range(PER_WORD):
        out = out + (tl.full((2 * ROWS, WIDE), 0.0, tl.float32),)
    return out


@device_function
def multiplied_sums(sums, factor, ROWS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr):
    """Multiply the sums of each row by the factor of the row. ``factor`` has shape (ROWS,).

    The sums of each row have two parts, high and low. Both are multiplied.
    """
    out = ()
    for c in tl.static_range(PER_WORD):
        pair = tl.reshape(sums[c], (2, ROWS, WIDE)) * factor[None, :, None]
        out = out + (tl.reshape(pair, (2 * ROWS, WIDE)),)
    return out


@device_function
def added_values(sums, weights, values, PER_WORD: tl.constexpr):
    """Multiply the values of a tile by the weights, and add the products to the sums.

    ``weights`` are the result of :func:`stacked`, of shape (2 * ROWS, TILE).
    """
    out = ()
    for c in tl.static_range(PER_WORD):
        out = out + (tl.dot(weights, values[c], sums[c], input_precision="ieee"),)
    return out


@device_function
def joined_sums(sums, ROWS: tl.constexpr, WIDE: tl.constexpr, PER_WORD: tl.constexpr):
    """Add the high and the low part of each row, and join the sums. The result has shape (ROWS, PER_WORD * WIDE)."""
    out = ()
    for c in tl.static_range(PER_WORD):
        out = out + (tl.sum(tl.reshape(sums[c], (2, ROWS, WIDE)), axis=0),)
    return joined_columns(out, ROWS, WIDE, PER_WORD)
