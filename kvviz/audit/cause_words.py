"""All causes that a diagnosis can name. Each cause is a record, with a function that writes its sentences.

Example: ``The width leaves out the scales. "copied" has 128 bytes per block. A block has 192 bytes, of which 64 are
scales.`` The first sentence says what happened. The numbers follow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvviz.audit.guesses import Guess, family_of, one_of_each, start_of
from kvviz.audit.repair_words import counted, joined
from kvviz.audit.view import View


@dataclass(frozen=True)
class Cause:
    """One kind of mistake.

    Attributes:
        name: a short name for programs, for example ``from_shape``.
        meaning: the mistake in one line.
        lesson: the number of the notebook that explains the mistake.
        tell: a function that writes the sentences with the numbers of some guesses about some views.
        like: a public report of the same mistake, for example ``vLLM issue 48412``; empty if there is none in the case
            book.
        apart: sentences for another cause that fits the same numbers. They say what to look at.
        advice: what to do if the numbers do not show a repair.
    """

    name: str
    meaning: str
    lesson: str
    tell: Callable[[Sequence[Guess], "_Who"], str]
    like: str = ""
    apart: str = ""
    advice: str = ""


def tell(cause: str, guesses: Sequence[Guess], views: Sequence[View]) -> str:
    """Return the sentences for guesses of one cause about the wrong ``views``."""
    return CAUSES[cause].tell(guesses, _Who(tuple(views)))


def tell_of_others(wrong: Sequence[View], repaired: Mapping[str, View], others: Sequence[View]) -> str:
    """Return a sentence about views of the same families that need no repair. If there are none, return "".

    Args:
        wrong: the views with the mistake.
        repaired: the repaired views by name.
        others: views that have no mistake, of all families.
    """
    families = {(family_of(view.name), view.storage.name) for view in wrong}
    fine = [view for view in others if (family_of(view.name), view.storage.name) in families]
    if not fine:
        return ""
    names = [f'"{view.name}"' for view in fine]
    who = joined(names) if len(names) <= 2 else f"{len(names):,} other views of these names"
    changed = [view for view in wrong if _strided(view) != _strided(repaired[view.name])]
    one = len(fine) == 1
    if {_strided(view) for view in changed} & {_strided(view) for view in fine}:
        return f" {who} {'has' if one else 'have'} the same shape and strides, but break{'s' if one else ''} no claim."
    return f" {who} need{'s' if one else ''} no repair."


def _strided(view: View) -> tuple:
    return view.shape, view.stride


@dataclass(frozen=True)
class _Who:
    """The wrong views as the subject of a sentence."""

    views: tuple[View, ...]

    def __str__(self) -> str:
        """Return ``"copied"``, ``"layer n segment" (3 views)`` or ``160 scale views``."""
        if len(self.views) == 1:
            return f'"{self.views[0].name}"'
        if len({family_of(view.name) for view in self.views}) == 1:
            return f'"{one_of_each(self.views)}" ({len(self.views)} views)'
        scales = all(view.role == "scale" for view in self.views)  # other roles are often not set
        return f"{len(self.views):,} {'scale views' if scales else 'views'}"

    def verb(self, many: str) -> str:
        """Return a verb that fits the subject: ``steps`` for one view, ``step`` for several views."""
        if len(self.views) > 1:
            return many
        return {"are": "is", "were": "was", "have": "has"}.get(many, f"{many}s")

    @property
    def starts(self) -> str:
        """Return a text with the first bytes of the views, for example ``at byte 128 or 17,024``."""
        return f"at byte {_range([start_of(view) for view in self.views])}"


def _range(values: Sequence[int]) -> str:
    found = sorted(set(values))
    if len(found) <= 2:
        return " or ".join(f"{value:,}" for value in found)
    return f"{found[0]:,} to {found[-1]:,}"


def _fact(guesses: Sequence[Guess], name: str) -> str:
    return _range([guess.facts[name] for guess in guesses])


def _bytes(guesses: Sequence[Guess], name: str) -> str:
    """Return a fact of the guesses as a text about bytes: ``1 byte``, ``2,048 bytes``, ``1 or 2 bytes``."""
    values = {guess.facts[name] for guess in guesses}
    return counted(values.pop(), "byte") if len(values) == 1 else f"{_fact(guesses, name)} bytes"


def _from_shape(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    factors = {guess.facts["factor"] for guess in guesses}
    if facts["layers"] > 1 and facts["layers"] * facts["page"] == facts["belongs"]:
        why = f" ({facts['layers']} layers of {counted(facts['page'], 'byte')})"
    elif len(factors) == 1 and facts["factor"] > 1:
        why = f", {facts['factor']} times as far"
    else:
        why = ""
    they = "It" if len(who.views) == 1 else "They"
    return (
        f"The strides of {who} were computed from the shape, as if each layer had a buffer of its own without gaps. "
        f"{they} {who.verb('start')} {who.starts} and {who.verb('step')} {_bytes(guesses, 'step')} per "
        f"{facts['axis']}. The step must be {_bytes(guesses, 'belongs')}{why}."
    )


def _offset_dropped(guesses: Sequence[Guess], who: _Who) -> str:
    return (
        f"The storage offset was dropped. {who} {who.verb('start')} {who.starts} and {who.verb('belong')} at byte "
        f"{_fact(guesses, 'belongs')}. The strides are right."
    )


def _one_base(guesses: Sequence[Guess], who: _Who) -> str:
    if "same" in guesses[0].facts:
        return (
            f"One base address was used for several views. {who} {who.verb('start')} {who.starts}, with the same shape "
            f"and strides."
        )
    if any("twin" in guess.facts for guess in guesses):
        return (
            f"Only one entry per start address was kept. {who} {who.verb('have')} the start and the width of "
            f'"{guesses[0].facts["twin"]}": {_bytes(guesses, "width")} per block. '
            f"The content has {_bytes(guesses, 'owed')} per block."
        )
    return f"One base address was used for several layers. {who} {who.verb('start')} {who.starts}."


def _layer_count(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    if "width" in facts:
        return (
            f"The length was multiplied by the number of layers. {who} {who.verb('have')} a length of "
            f"{_bytes(guesses, 'width')} per block, which is {facts['counted']} times "
            f"{counted(facts['page'], 'byte')}. In one layer, the content of a block has only "
            f"{counted(facts['page'], 'byte')}."
        )
    return (
        f"The block stride counts a wrong number of layers. {who} {who.verb('step')} {_bytes(guesses, 'step')} per "
        f"block, which is {counted(facts['counted'], 'layer')} of {counted(facts['page'], 'byte')}. A block holds "
        f"{counted(facts['layers'], 'layer')}, so the step must be {_bytes(guesses, 'belongs')}."
    )


def _padding(guesses: Sequence[Guess], who: _Who) -> str:
    added = any("reverse" in guess.facts for guess in guesses)
    return (
        f"Padding was {'added to' if added else 'left out of'} the block stride. {who} {who.verb('step')} "
        f"{_bytes(guesses, 'step')} per block. {'Without' if added else 'With'} padding, blocks lie "
        f"{_bytes(guesses, 'belongs')} apart."
    )


def _kv_swapped(guesses: Sequence[Guess], who: _Who) -> str:
    first = guesses[0]
    more = f" This holds for {len(who.views)} views." if len(who.views) > 1 else ""
    return (
        f'K and V are exchanged. "{first.view}" lies exactly where "{first.facts["other"]}" belongs, from byte '
        f"{first.facts['start']:,} on.{more}"
    )


def _order(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    if not facts["outer"]:
        return f"The axes {facts['inner']} are in the wrong order in {who}. Each axis has the step of another one."
    return (
        f"The axes {facts['inner']} and {facts['outer']} are exchanged in {who}. The step along {facts['inner']} is "
        f"{_bytes(guesses, 'step')} and must be {_bytes(guesses, 'belongs')}."
    )


def _kv_packing(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    if facts["taken"] == "double":
        return (
            f"The width counts a V half that does not exist. {who} {who.verb('have')} a length of "
            f"{_bytes(guesses, 'width')} per block, twice the content of {_bytes(guesses, 'owed')}."
        )
    if "width" in facts:
        return (
            f"K and V of a block were taken as one range of bytes, but they lie in separate halves. {who} "
            f"{who.verb('have')} a length of {_bytes(guesses, 'width')} per block. From the first byte of K to the "
            f"last byte of V there are {_bytes(guesses, 'owed')}."
        )
    split = "K and V were taken for two halves of a block, but K cells and V cells alternate."
    packed = "K cells and V cells were taken to alternate, but K and V are two halves of a block."
    return (
        f"{split if facts['taken'] == 'split' else packed} {who} {who.verb('step')} {_bytes(guesses, 'step')} from "
        f"one cell to the next cell of the same half (K or V). The step must be {_bytes(guesses, 'belongs')}."
    )


def _width(guesses: Sequence[Guess], who: _Who) -> str:
    if "storage" in guesses[0].facts:
        return (
            f'The scales lie in a storage of their own, "{guesses[0].facts["storage"]}", and no extent lies there. '
            f"{who} {who.verb('take')} the data only."
        )
    return (
        f"The width leaves out the scales. {who} {who.verb('have')} {_bytes(guesses, 'width')} per block. "
        f"A block has {_bytes(guesses, 'owed')}, of which {_fact(guesses, 'missing')} are scales."
    )


def _storage_left_out(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    return (
        f'"{facts["content"]}" lies in a storage of its own, "{facts["storage"]}", and no extent lies there. '
        f"{who} {who.verb('take')} the bytes of another storage only."
    )


def _half_strides(guesses: Sequence[Guess], who: _Who) -> str:
    return (
        f'{who} {who.verb("have")} the strides of "{guesses[0].facts["other"]}", which lies in another storage. The '
        f"largest step is {_bytes(guesses, 'step')} and must be {_bytes(guesses, 'belongs')}."
    )


def _ring_start(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    return (
        f"The cells of a ring of {counted(facts['cells'], 'byte')} do not start where the ring expects them. All "
        f"{len(guesses)} views must move on by {counted(facts['moved'], 'byte')}, counted around the ring."
    )


def _step_for_length(guesses: Sequence[Guess], who: _Who) -> str:
    return (
        f"The distance between blocks was used as a length. {who} {who.verb('have')} a length of "
        f"{_bytes(guesses, 'width')} per block, which is the distance. In one layer, the content of a block has only "
        f"{_bytes(guesses, 'owed')}."
    )


def _block_unit(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    if "pool" in facts:
        return (
            f"The block ids count in another unit. The blocks of {who} lie {_bytes(guesses, 'step')} apart, and the "
            f"blocks of other views in the same pool lie {_bytes(guesses, 'pool')} apart. One id cannot stand for both."
        )
    if "entries" in facts:
        return (
            f"The block ids count in another unit. {who} {who.verb('have')} {facts['entries']:,} blocks, and the "
            f"content has {counted(facts['blocks'], 'block')}."
        )
    steps = [guess for guess in guesses if "count" not in guess.facts]
    facts = (steps or guesses)[0].facts
    if "count" in facts:
        per_id = f", {facts['ratio']} per id" if facts["ratio"] > 1 else ""
        parts = []
        if facts["count"] > facts["held"]:
            have = "id has" if facts["held"] == 1 else "ids have"
            used = (
                f"The table names id {facts['count'] - 1:,}" if facts["table"] else f"{facts['count']:,} ids are used"
            )
            parts.append(f"{used}, but only {facts['held']:,} {have} a place "
                         f"({counted(facts['blocks'], 'block')}{per_id}).")  # fmt: skip
        if facts["step"] and facts["step"] != facts["belongs"]:
            parts.append(f"One id is taken for {facts['step']:,} bytes, and has {facts['belongs']:,} bytes.")
        return f"The ids and the blocks of {who} are of different units. {' '.join(parts)}"
    if facts.get("width", facts.get("owed")) != facts.get("owed"):
        return (
            f"The ids and the length count blocks of different sizes. {who} {who.verb('have')} a length of "
            f"{_bytes(steps, 'width')} per id, but an id stands for a block of {_bytes(steps, 'owed')}. The ratio is "
            f"{facts['ratio']}."
        )
    return (
        f"The ids and the step count blocks of different sizes. {who} {who.verb('step')} {_bytes(steps, 'step')} per "
        f"id, but the blocks of the content lie {_bytes(steps, 'belongs')} apart. The ratio is {facts['ratio']}. The "
        f"repair assumes that an id is the id of such a block. If an id stands for {_bytes(steps, 'step')}, convert "
        f"the ids instead."
    )


def _sections(guesses: Sequence[Guess], who: _Who) -> str:
    if "pieces" in guesses[0].facts:
        return (
            f"Several separate pieces were taken as one range. {who} {who.verb('have')} {_bytes(guesses, 'part')}, "
            f"which is the right number. But the right bytes lie in {guesses[0].facts['pieces']} pieces."
        )
    return (
        f"Several sections of a page were sliced as one range. {who} {who.verb('have')} "
        f"{_bytes(guesses, 'part')}{' each' if len(who.views) > 1 else ''}, which is the right number. But the bytes "
        f"belong to several sections."
    )


def _rank_sections(guesses: Sequence[Guess], who: _Who) -> str:
    return (
        f"Each rank got a section of its own, but {guesses[0].facts['ranks']} ranks hold the same heads. {who} "
        f"{who.verb('start')} {who.starts} and {who.verb('belong')} at byte {_fact(guesses, 'belongs')}."
    )


def _region(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    if facts["taken"] == "pool":
        return (
            f"All scales lie in one region behind the data of all blocks. Other views of the same storage expect each "
            f"block in one piece, with its scales. The scales start at byte {facts['start']:,}; the scales of block 0 "
            f"belong at byte {facts['belongs']:,}."
        )
    region = "The scales were taken to lie in one region of their own, but each scale lies in its cell."
    cell = "The scales were taken to lie in their cells, but they lie in one region of their own."
    if facts["taken"] == "block":
        cell = "The scales were taken to lie in their cells, but they lie behind the data of their block."
    return (
        f"{region if facts['taken'] == 'region' else cell} {who} {who.verb('start')} {who.starts} and "
        f"{who.verb('belong')} at byte {_fact(guesses, 'belongs')}."
    )


def _element(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    if "before" in facts:
        return (
            f"Values were counted as bytes. {who} {who.verb('start')} {facts['count']:,} bytes after "
            f'"{facts["before"]}". '
            f"A row there has {counted(facts['count'], 'value')} in {counted(facts['bytes'], 'byte')}."
        )
    large = facts["taken"] == "bytes for elements"
    mistake = "Bytes were used as elements" if large else "Elements were used as bytes"
    return (
        f"{mistake}. The {facts['what']} of {who} {'is' if facts['what'] == 'offset' else 'are'} "
        f"{facts['itemsize']} times too {'large' if large else 'small'}, because an element has "
        f"{counted(facts['itemsize'], 'byte')}."
    )


def _other(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    wrong, right = (f"{value:,}" if isinstance(value, int) else value for value in (facts["is"], facts["belongs"]))
    first = "" if len(who.views) == 1 else f' of "{guesses[0].view}"'
    more = "" if len(who.views) == 1 else f" {len(who.views) - 1} more differ in the same way."
    return f"The {facts['what']} of {who} is wrong. The number{first} is {wrong} and must be {right}.{more}"


def _address(guesses: Sequence[Guess], who: _Who) -> str:
    return f"{guesses[0].facts['type']} is too narrow for addresses. It cannot hold all addresses of {who} exactly."


def _unaligned(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    step = f", and rows lie {counted(facts['step'], 'byte')} apart" if facts["step"] else ""
    address = facts["address"]
    base = f" The storage starts {counted(address, 'byte')} after such a multiple." if address else ""
    only = " The address of the storage is not known, so only offsets were judged." if address is None else ""
    return (
        f"Not all rows of {who} start at a multiple of {counted(facts['boundary'], 'byte')}. The first row starts at "
        f"byte {facts['start']:,}{step}.{base}{only}"
    )


def _undeclared(guesses: Sequence[Guess], who: _Who) -> str:
    readings = [f'"{name}"' for name in guesses[0].facts["readings"]]
    return f"The shape of {who} can be read in {len(readings)} ways, and none is declared: {joined(readings, 'or')}."


def _padding_slot(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    where = "before the first row" if facts["slot"] < 0 else f"on the last row (slot {facts['slot']:,})"
    return (
        f'The slot of a padding token (-1) was used as an index. {who} writes {where} of "{facts["cache"]}", at byte '
        f"{facts['start']:,}. A padding token must write nothing."
    )


def _rounded(guesses: Sequence[Guess], who: _Who) -> str:
    size = counted(guesses[0].facts["itemsize"], "byte")
    return (
        f"Places were rounded to whole elements. An element of {who} has {size}, and its rightful places are no "
        f"multiples of {size}. {who} {who.verb('start')} {who.starts} and {who.verb('belong')} at byte "
        f"{_fact(guesses, 'belongs')}."
    )


def _broadcast(guesses: Sequence[Guess], who: _Who) -> str:
    return (
        f"Elements were repeated without copying them (a broadcast or a tile). {who} {who.verb('have')} the stride 0 "
        f"along {guesses[0].facts['axis']}, and the program writes through this view."
    )


def _table(guesses: Sequence[Guess], who: _Who) -> str:
    other = guesses[0].facts.get("other")
    if other:
        return f'A table names a block twice. {who} {who.verb("have")} a block that "{other}" has too.'
    return f"A table names a wrong block. {who} {who.verb('lie')} on bytes outside the blocks that were given."


def _copy(guesses: Sequence[Guess], who: _Who) -> str:
    facts = guesses[0].facts
    steps = f" {who} {who.verb('step')} {facts['step']:,} bytes per block, and the source steps {facts['belongs']:,}."
    return f"The two sides of a copy differ.{steps if facts['step'] != facts['belongs'] else ''}"


_LIST = (
    Cause("from_shape", "Strides were computed from the shape, as if the buffer were dense.", "04", _from_shape,
          "vLLM issue 48412", "Strides that were computed from the shape fit too. Look at the code that makes the "
          "strides: does it use the shape, or the strides of the buffer?"),
    Cause("offset_dropped", "The storage offset was dropped.", "04", _offset_dropped,
          apart="A dropped storage offset fits too. Look at the code that makes the views: does it add the offset of "
          "the buffer?"),
    Cause("one_base", "One base address was used for several layers.", "09", _one_base,
          "vLLM 57661", "One base address for several layers fits too. Look at the list of addresses: does each layer "
          "have an address of its own?"),
    Cause("layer_count", "A stride or a width counts a wrong number of layers.", "09", _layer_count,
          "vllm-gaudi 1201", "A wrong number of layers fits too. Look at the code that makes this number: does it "
          "multiply by a number of layers?"),
    Cause("padding_left_out", "Padding was left out of a stride, or added to one.", "09", _padding,
          "kvcached 399", "Padding that was left out fits too. Look at the page size in the code: does it have the "
          "padding?"),
    Cause("kv_swapped", "K and V were exchanged.", "09", _kv_swapped,
          apart="Exchanged K and V fit too. Look at the code: which half does it take first?"),
    Cause("token_head_order", "Tokens and heads were exchanged (NHD and HND).", "02", _order,
          "vLLM 55904", "Exchanged axes of tokens and heads fit too. Look at the order that the code expects: tokens "
          "outside (NHD), or heads outside (HND)?"),
    Cause("kv_order", "The K/V axis was taken to lie elsewhere.", "09", _order,
          "LMCache 2495", "Another place of the K/V axis fits too. Look at the shape: is K/V the first axis, or is it "
          "inside the block?"),
    Cause("axis_order", "The axes are in another order.", "02", _order,
          "vLLM 50084", "Another order of the axes fits too. Look at the code: does it permute the axes?"),
    Cause("kv_packing", "K and V alternate cell by cell, but were taken for two halves, or the reverse.", "02",
          _kv_packing, "kvcached 391", "Another order of K and V inside a block fits too. Look at the code: does V of "
          "a block start after all K cells, or does each V cell follow its K cell?"),
    Cause("width_without_scales", "A width leaves out the scales.", "08", _width,
          "vLLM PR 48411", "A width without the scales fits too. Look at the code that makes the width: does it add "
          "the scales?"),
    Cause("storage_left_out", "A transfer leaves out a whole storage.", "08", _storage_left_out,
          "sglang 24878"),
    Cause("step_for_length", "The distance between blocks was used as a length.", "08", _step_for_length,
          "vLLM PR 50276", "A distance that was used as a length fits too. Look at the code that makes the length: "
          "does it read a stride?"),
    Cause("block_unit", "Ids count in another unit, or in another pool.", "09", _block_unit,
          "vLLM 28677", "Ids of blocks of another size fit too. Look at the number of tokens per id: is it the same "
          "where the ids are made and where they are used?"),
    Cause("sections", "Several sections of a page were sliced as one range.", "09", _sections,
          "TensorRT-LLM 6507", "Several pieces that were taken as one range fit too. Look at the page: how many "
          "sections does it have?",
          "Take the pieces one by one. In the claim, each piece is a view of its own."),
    Cause("rank_sections", "Ranks that share heads got sections of their own.", "09", _rank_sections,
          "sglang 19086", "Ranks that share heads fit too. Look at the numbers of ranks and heads: are there more "
          "ranks than heads?"),
    Cause("scale_region", "Scales were taken to lie in a region of their own, or in their cells.", "09", _region,
          "vLLM 46329", "Scales in another place fit too. Look at the code: does it place scales behind all data, or "
          "in the cells?"),
    Cause("element_size", "Bytes were used as elements, or elements as bytes.", "02", _element,
          apart="Bytes that were used as elements fit too. Look at the units of the offset and of the strides."),
    Cause("padding_slot", "A padding slot was used as an index.", "09", _padding_slot,
          apart="A padding slot that was used as an index fits too. Look at the slots: is one of them -1?"),
    Cause("address_width", "A number type is too narrow for the addresses.", "09", _address,
          "vllm-ascend-deepseekv4 90", "A type that is too narrow for addresses fits too. Look at the type of the "
          "addresses."),
    Cause("unaligned_rows", "Rows do not start at the boundary.", "10", _unaligned, "vLLM 45466"),
    Cause("undeclared", "A shape can be read in several ways.", "09", _undeclared, "LMCache 4467",
          advice="Name the reading that is meant in the field declared of the claim."),
    Cause("rounded", "Places were rounded to whole elements.", "02", _rounded,
          apart="Places that were rounded to whole elements fit too. Look at the code: does it divide bytes by the "
          "size of an element?"),
    Cause("ring_start", "The cells of a ring start at a wrong cell.", "09", _ring_start,
          "llama.cpp 25297", "A ring that starts at another cell fits too. Look at the code that fills the ring: does "
          "it take the position modulo the number of cells?"),
    Cause("half_strides", "The strides of K were used for V, or the reverse.", "09", _half_strides,
          "flashinfer 3684", "The strides of the other half fit too. Look at the code: do K and V each have strides of "
          "their own?"),
    Cause("broadcast", "A view repeats its elements, and the program writes through it.", "02", _broadcast,
          apart="A broadcast fits too. Look at the strides: is one of them 0?"),
    Cause("table_entry", "A table names a wrong block, or one block twice.", "09", _table,
          apart="A wrong entry of a table fits too. Look at the ids in the table.",
          advice="Correct the table. If an old entry is not used any more (a ring that wraps around), leave this entry "
          "out of the claim."),
    Cause("copy_steps", "The two sides of a copy differ.", "08", _copy),
    Cause("other_number", "A number is wrong, and no known mistake explains it.", "09", _other),
)  # fmt: skip

CAUSES = {cause.name: cause for cause in _LIST}
"""Every cause by name."""
