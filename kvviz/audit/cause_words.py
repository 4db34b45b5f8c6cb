"""The causes that a diagnosis can name: one record each, and the sentence that tells the numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvviz.audit.cause_rules import Guess, family_of, natural, start_of, steps_of
from kvviz.audit.view import View


@dataclass(frozen=True)
class Cause:
    """One kind of mistake.

    Attributes:
        name: a short name for programs, for example ``from_shape``.
        meaning: the mistake in one line.
        apart: what tells this cause from others that fit the same numbers.
        lesson: the notebook that explains the mistake.
        tell: a function that writes the sentence with the numbers of some guesses.
    """

    name: str
    meaning: str
    apart: str
    lesson: str
    tell: Callable[[Sequence[Guess], Sequence[View]], str]


@dataclass(frozen=True)
class Told:
    """The words of one diagnosis: the cause, and the repaired numbers."""

    text: str
    repair: str


def tell(cause: str, guesses: Sequence[Guess], views: Sequence[View]) -> Told:
    """Return the words for guesses of one cause about the wrong ``views``."""
    repaired = [guess.repaired for guess in guesses if guess.repaired is not None]
    claims = [guess.facts["claim"][1] for guess in guesses if "claim" in guess.facts]
    repair = repair_words(repaired) if repaired else f"claim {claims[0]}" if claims else ""
    return Told(CAUSES[cause].tell(guesses, views), repair)


def repair_words(repaired: Sequence[View]) -> str:
    """Return offsets and strides of repaired views in words, one line per family: ``layer n K scale: offset ...``."""
    families: dict[tuple, list[View]] = {}
    for view in sorted(repaired, key=lambda one: natural(one.name)):
        families.setdefault((family_of(view.name), view.shape, view.stride, view.itemsize), []).append(view)
    lines = []
    for (name, shape, stride, itemsize), members in families.items():
        offsets = [view.offset for view in members]
        numbers = [next((part for part in natural(view.name) if isinstance(part, int)), 0) for view in members]
        unit = f" (in elements of {itemsize} bytes)" if itemsize > 1 else ""
        if not shape or 0 in shape:
            lines.append(f"{members[0].name}: write nothing (skip slots below 0)")
            continue
        who = members[0].name if len(members) == 1 else name.replace("#", "n", 1)
        lines.append(f"{who}: shape {shape}, offset {_linear(offsets, numbers)}, strides {stride}{unit}")
    return "; ".join(lines)


def _linear(offsets: list[int], numbers: list[int]) -> str:
    """Return ``8,448 n + 32`` if the offsets are linear in the views' numbers, else the offsets."""
    if len(offsets) == 1:
        return f"{offsets[0]:,}"
    if len(set(offsets)) == 1:
        return f"{offsets[0]:,}"
    rise = numbers[1] - numbers[0]
    slope = (offsets[1] - offsets[0]) // rise if rise else 0
    base = offsets[0] - slope * numbers[0]
    if all(offset == base + slope * number for offset, number in zip(offsets, numbers, strict=True)):
        return f"{slope:,} n + {base:,}"
    return f"{', '.join(f'{offset:,}' for offset in offsets[:4])}{', ...' if len(offsets) > 4 else ''}"


def _who(views: Sequence[View]) -> str:
    if len(views) == 1:
        return views[0].name
    roles = {view.role for view in views}
    return f"{len(views)} {roles.pop() if len(roles) == 1 else ''} views".replace("  ", " ")


def _verb(views: Sequence[View], one: str, many: str) -> str:
    return one if len(views) == 1 else many


def _numbers(values: Sequence[int]) -> str:
    found = sorted(set(values))
    if len(found) <= 2:
        return " or ".join(f"{value:,}" for value in found)
    return f"{found[0]:,} to {found[-1]:,}"


def _starts(views: Sequence[View]) -> str:
    return f"byte {_numbers([start_of(view) for view in views])}"


def _fact(guesses: Sequence[Guess], name: str) -> str:
    return _numbers([guess.facts[name] for guess in guesses])


def _from_shape(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    factor = {guess.facts.get("factor", 0) for guess in guesses}
    times = f", {factor.pop()} times as far" if len(factor) == 1 and max(factor, default=0) > 1 else ""
    return (
        f"{_who(views)} {_verb(views, 'was', 'were')} made from the shape: strides as in one dense buffer. "
        f"{_verb(views, 'It starts', 'They start')} at {_starts(views)} and "
        f"{_verb(views, 'steps', 'step')} {_fact(guesses, 'step')} bytes per block. "
        f"The data {'of that layer ' if len(views) == 1 else ''}step {_fact(guesses, 'belongs')} bytes{times}."
    )


def _offset_dropped(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    return (
        f"The storage offset was dropped: {_who(views)} {_verb(views, 'starts', 'start')} at {_starts(views)}, and "
        f"{_verb(views, 'belongs', 'belong')} at byte {_fact(guesses, 'belongs')}. The strides are right."
    )


def _one_base(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    if any("twin" in guess.facts for guess in guesses):
        twin = guesses[0].facts["twin"]
        return (
            f"{_who(views)} has the start and the width of {twin}: one entry per start address was kept. "
            f"It is {_fact(guesses, 'width')} bytes wide, and its content is {_fact(guesses, 'owed')} bytes wide."
        )
    return (
        f"One base address serves several layers: {_who(views)} {_verb(views, 'starts', 'start')} at {_starts(views)}."
    )


def _layer_count(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    facts = guesses[0].facts
    if "width" in facts:
        return (
            f"{_who(views)} {_verb(views, 'is', 'are')} {_fact(guesses, 'width')} bytes wide, which is "
            f"{facts['counted']} layers of {facts['page']:,} bytes. A block there holds {facts['layers']} layer."
        )
    return (
        f"A wrong number of layers is in the block stride: {_who(views)} {_verb(views, 'steps', 'step')} "
        f"{_fact(guesses, 'step')} bytes per block, which is {facts['counted']} pages of {facts['page']:,} bytes. "
        f"{facts['layers']} layers share a block: {_fact(guesses, 'belongs')} bytes."
    )


def _padding(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    more, less = ("step", "belongs") if any("reverse" in g.facts for g in guesses) else ("belongs", "step")
    wrong = "Padding was added to" if more == "step" else "Padding was left out of"
    return (
        f"{wrong} the block stride: {_who(views)} {_verb(views, 'steps', 'step')} {_fact(guesses, 'step')} bytes per "
        f"block and {_verb(views, 'belongs', 'belong')} at steps of {_fact(guesses, 'belongs')} bytes. Without padding a "
        f"block has {_fact(guesses, less)} bytes, with padding {_fact(guesses, more)}."
    )


def _kv_swapped(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    return (
        f"K and V are exchanged: {guesses[0].view} lies exactly where {guesses[0].facts['other']} belongs"
        f"{'' if len(views) == 1 else f', and so on for {len(views)} views'}."
    )


def _order(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    facts = guesses[0].facts
    if not facts["outer"]:
        return f"The axes {facts['inner']} of {_who(views)} are in another order: the steps are the same numbers, exchanged."
    return (
        f"{_who(views)} {_verb(views, 'walks', 'walk')} the axes in another order: {facts['inner']} inside {facts['outer']}. "
        f"A step along {facts['inner']} is {_fact(guesses, 'step')} bytes, and belongs at {_fact(guesses, 'belongs')} bytes."
    )


def _kv_packing(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    facts = guesses[0].facts
    if facts["taken"] == "double":
        return (
            f"{_who(views)} {_verb(views, 'is', 'are')} {_fact(guesses, 'width')} bytes wide, twice the content of "
            f"{_fact(guesses, 'owed')} bytes: a V half was counted that does not lie there."
        )
    if "width" in facts:
        return (
            f"{_who(views)} {_verb(views, 'takes', 'take')} K and V of a block as one range of {_fact(guesses, 'width')} "
            f"bytes. They lie in separate halves, and the block reaches over {_fact(guesses, 'owed')} bytes."
        )
    meant = "two halves of a block" if facts["taken"] == "split" else "alternating cells"
    return (
        f"K and V were taken for {meant}: {_who(views)} {_verb(views, 'steps', 'step')} {_fact(guesses, 'step')} bytes "
        f"from cell to cell, and {_verb(views, 'belongs', 'belong')} at {_fact(guesses, 'belongs')} bytes."
    )


def _width(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    return (
        f"The width leaves out the scales: {_who(views)} {_verb(views, 'takes', 'take')} {_fact(guesses, 'width')} bytes "
        f"per block. A block has {_fact(guesses, 'owed')} bytes, of which {_fact(guesses, 'missing')} are scales."
    )


def _step_for_length(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    return (
        f"The distance between blocks was used as a length: {_who(views)} {_verb(views, 'takes', 'take')} "
        f"{_fact(guesses, 'width')} bytes per block, and {_verb(views, 'owns', 'own')} {_fact(guesses, 'owed')} of them."
    )


def _block_unit(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    facts = next((guess.facts for guess in guesses if "count" not in guess.facts), guesses[0].facts)
    guesses = [guess for guess in guesses if ("count" in guess.facts) == ("count" in facts)]
    if "count" in facts:
        parts = []
        if facts["count"] > facts["held"]:
            parts.append(f"{facts['count']:,} ids are used, and {facts['held']:,} have a place "
                         f"({facts['blocks']:,} blocks, {facts['ratio']} per id)")  # fmt: skip
        if facts["step"] and facts["step"] != facts["belongs"]:
            parts.append(f"an id is taken for {facts['step']:,} bytes, and is {facts['belongs']:,} bytes")
        return f"The ids of {_who(views)} count in another unit: {'; '.join(parts)}."
    if facts.get("width", facts.get("owed")) != facts.get("owed"):
        return (
            f"Blocks of another unit: {_who(views)} {_verb(views, 'takes', 'take')} {_fact(guesses, 'width')} bytes per id, "
            f"{facts['ratio']} times the {_fact(guesses, 'owed')} bytes of a block. Ids were converted, and the length was not."
        )
    return (
        f"Blocks of another unit: {_who(views)} {_verb(views, 'steps', 'step')} {_fact(guesses, 'step')} bytes per id, and "
        f"an id is {_fact(guesses, 'belongs')} bytes, a ratio of {facts['ratio']}."
    )


def _sections(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    return (
        f"Sections of a page were sliced as one range: {_who(views)} {_verb(views, 'has', 'have')} the right number of bytes, "
        f"{guesses[0].facts['part']:,} each, at the wrong places. The bytes meant lie in several sections."
    )


def _rank_sections(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    ranks = guesses[0].facts["ranks"]
    return (
        f"Each rank was given a section of its own, but {ranks} ranks hold the same heads: {_who(views)} "
        f"{_verb(views, 'starts', 'start')} at {_starts(views)} and {_verb(views, 'belongs', 'belong')} at byte "
        f"{_fact(guesses, 'belongs')}."
    )


def _region(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    facts = guesses[0].facts
    where = "one region after the data" if facts["taken"] == "region" else "each behind its cell"
    right = "behind each cell" if facts["taken"] == "region" else "in a region of their own"
    return (
        f"Scales were taken to lie in {where}, and they belong {right}: {_who(views)} {_verb(views, 'starts', 'start')} at "
        f"{_starts(views)}, and {_verb(views, 'belongs', 'belong')} at byte {_fact(guesses, 'belongs')}."
    )


def _element(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    facts = guesses[0].facts
    wrong = (
        "bytes where elements are expected"
        if facts["taken"] == "elements for bytes"
        else "elements where bytes are expected"
    )
    return (
        f"The {facts['what']} of {_who(views)} {'is' if facts['what'] == 'offset' else 'are'} off by a factor of "
        f"{facts['itemsize']}, the size of an element: {wrong}."
    )


def _other(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    facts = guesses[0].facts
    show = lambda value: f"{value:,}" if isinstance(value, int) else str(value)  # noqa: E731
    return f"The {facts['what']} of {_who(views)} is {show(facts['is'])} and belongs at {show(facts['belongs'])}."


def _address(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    return f"{guesses[0].facts['type']} cannot hold every element address of {_who(views)} exactly."


def _unaligned(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    return f"The rows of {_who(views)} do not all start at a multiple of {guesses[0].facts['boundary']} bytes."


def _undeclared(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    return f"The shape of {_who(views)} can be read in several ways ({guesses[0].facts['readings']}), and none is declared."


def _padding_slot(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    facts = guesses[0].facts
    where = "before the first row" if facts["slot"] < 0 else f"on the last row, slot {facts['slot']:,},"
    return (
        f"A padding slot was sent to memory: {_who(views)} writes {where} of {facts['cache']}, at byte {facts['start']:,}. "
        f"Slot -1 stands for padding, and must write nothing."
    )


def _copy(guesses: Sequence[Guess], views: Sequence[View]) -> str:
    return f"The two sides of a copy differ in width, step or number of blocks: see {_who(views)}."


_LIST = (
    Cause("from_shape", "Strides were made from the shape, as if the buffer were dense.",
          "strides made from the shape: then views with padding or more layers go wrong in the same way", "04", _from_shape),
    Cause("offset_dropped", "The storage offset was dropped.",
          "offset dropped: then a single layer in a buffer of its own is right", "04", _offset_dropped),
    Cause("one_base", "One base address was used for several layers.",
          "one base address: then the list of registered addresses has one entry for several layers", "09", _one_base),
    Cause("layer_count", "A wrong number of layers is in a stride or width.",
          "wrong number of layers: then the number changes with the number of layers of the model", "04", _layer_count),
    Cause("padding_left_out", "Padding of a page was left out of a stride, or added to one.",
          "padding left out: then a cache without padding is right", "04", _padding),
    Cause("kv_swapped", "K and V were exchanged.",
          "K and V exchanged: then keys decode to values", "09", _kv_swapped),
    Cause("token_head_order", "Tokens and heads were exchanged (NHD and HND).",
          "NHD read as HND: then one head, or one token per block, is right", "02", _order),
    Cause("kv_order", "The K/V axis was taken to lie elsewhere.",
          "K/V axis elsewhere: then a cache with one block is right", "09", _order),
    Cause("axis_order", "The axes are in another order.",
          "another order of axes: then the same bytes are used, in another order", "02", _order),
    Cause("kv_packing", "K and V alternate cell by cell, but were taken for two halves, or the reverse.",
          "packed against split: then a version with the other packing is right", "02", _kv_packing),
    Cause("width_without_scales", "A width leaves out the scales.",
          "width without scales: then a cache without scales is right", "08", _width),
    Cause("step_for_length", "The distance between blocks was used as a length.",
          "distance used as length: then a buffer per layer is right", "08", _step_for_length),
    Cause("block_unit", "Block ids count in another unit (kernel block, manager block, token).",
          "another unit of block ids: then equal block sizes are right", "09", _block_unit),
    Cause("sections", "Sections of a page were sliced as one range.",
          "sections sliced as one: then a page with one section is right", "09", _sections),
    Cause("rank_sections", "Ranks that share heads were given sections of their own.",
          "shared heads: then as many ranks as heads are right", "09", _rank_sections),
    Cause("scale_region", "Scales were looked for in a region of their own, but lie behind each cell, or the reverse.",
          "scale region: then a release that keeps scales in the other place is right", "09", _region),
    Cause("element_size", "Bytes were used as elements, or elements as bytes.",
          "bytes for elements: then a cache of one-byte elements is right", "02", _element),
    Cause("padding_slot", "A padding slot was used as an index.",
          "padding slot: then batches without padding are right", "09", _padding_slot),
    Cause("address_width", "A number type is too narrow for the addresses.",
          "address width: then a small cache is right", "09", _address),
    Cause("unaligned_rows", "Rows do not start at the boundary.", "", "10", _unaligned),
    Cause("undeclared", "A shape can be read in several ways.", "", "09", _undeclared),
    Cause("copy_steps", "The two sides of a copy differ.", "", "08", _copy),
    Cause("other_number", "A number is wrong, and no known mistake explains it.", "", "09", _other),
)  # fmt: skip

CAUSES = {cause.name: cause for cause in _LIST}
"""Every cause by name."""
