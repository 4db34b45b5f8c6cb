"""Explain views that overlap, or leave their storage, if no claim says where they belong.

Without a rightful place, a rule proposes repaired numbers from the neighbours of a view: other layers with the same
name, the content of a block, the size of the storage. A guess is returned only if the audit of the repaired views has
fewer findings about these views.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from kvviz.audit.budget import spend
from kvviz.audit.findings import Audit, Finding
from kvviz.audit.guesses import Guess, Surroundings, axis_name, block_axis, family_of, start_of, steps_of
from kvviz.audit.view import View

Audited = Callable[[dict[str, View]], Audit]
"""Audits a set of views with the claims at hand."""

Proposal = tuple[str, dict, list[View]]
"""A cause, its facts, and the repaired views."""


PAIR_COST = 20
"""Work of looking at two views together, in units of the work limit."""

_KINDS = ("collision", "out_of_bounds", "self_overlap")


def explain_overlap(views: Mapping[str, View], findings: Sequence[Finding], audited: Audited) -> Iterator[list[Guess]]:
    """Yield guesses for the views of the findings, family by family. Each repair has been audited."""
    state = dict(views)
    sizes = Counter((family_of(view.name), view.storage.name) for view in state.values())
    families = dict.fromkeys((family_of(name), state[name].storage.name) for f in findings for name in f.views)
    for key in sorted(families, key=lambda key: sizes[key] > 1):  # a single view is more often wrong than many
        before = [finding for finding in audited(state).findings if finding.severity == "error"]
        wrong = (name for finding in before if finding.kind in _KINDS for name in finding.views)
        name = next((one for one in wrong if (family_of(one), state[one].storage.name) == key), None)
        proven = _first_that_helps(state, name, len(before), audited) if name else None
        if proven:
            cause, facts, repaired = proven
            changed = [view for view in repaired if view != state[view.name]]
            state |= {view.name: view for view in changed}
            yield from ([Guess(cause, view.name, view, facts)] for view in changed)
    left = [finding for finding in audited(state).findings if finding.kind == "collision"]
    yield from ([guess] for finding in left for guess in _without_repair(state, finding))


def _without_repair(state: Mapping[str, View], finding: Finding) -> list[Guess]:
    """Return a guess about a collision whose numbers show the mistake, but not the repair."""
    first, *others = (state[name] for name in finding.views)
    same = [_geometry(view) == _geometry(first) for view in others]
    if all(same):
        facts = {"same": True, "advice": _ONE_MEMORY}
        return [Guess("one_base", view.name, None, facts, (finding.views,)) for view in (first, *others)]
    rows = [(view.shape[1:], view.stride[1:], view.itemsize) for view in (first, *others)]
    steps = {abs(steps_of(view)[0]) for view in (first, *others) if view.shape} - {0}
    if len(set(rows)) == 1 and len(steps) == 1 and first.shape:
        (step,) = steps
        if not any((start_of(view) - start_of(first)) % step for view in others):
            return [Guess("table_entry", others[-1].name, None, {"other": first.name}, (finding.views,))]
    return []


_ONE_MEMORY = (
    "If the names stand for one memory, keep one of the views. If views are only read, declare this. Otherwise give "
    "each view an address of its own."
)


def _geometry(view: View) -> tuple:
    return view.shape, steps_of(view), start_of(view), view.itemsize


def _first_that_helps(state: dict[str, View], name: str, errors: int, audited: Audited) -> Proposal | None:
    """Return the first proposal that leaves no error about its views, and fewer errors than before."""
    for cause, facts, repaired in _proposals(state, name):
        changed = {view.name: view for view in repaired}
        after = [finding for finding in audited({**state, **changed}).findings if finding.severity == "error"]
        if len(after) < errors and not any(changed.keys() & set(finding.views) for finding in after):
            return cause, facts, repaired
    return None


def padding_slot(state: Mapping[str, View], name: str) -> Proposal | None:
    """If a row lies at slot -1 of a cache (on its last row, or one row before its first row), propose to write
    nothing."""
    row = state[name]
    for cache in state.values():
        tokens = [axis for axis in (0, 1) if axis < len(cache.shape) - 1]
        if cache.storage != row.storage or cache.itemsize != row.itemsize or len(tokens) < 2 or cache is row:
            continue
        if row.shape[-1:] != cache.shape[-1:] or row.num_elements * prod(cache.shape[:2]) != cache.num_elements:
            continue
        last = sum((cache.shape[axis] - 1) * cache.stride[axis] for axis in tokens)
        for slot, place in ((prod(cache.shape[:2]) - 1, cache.offset + last), (-1, cache.offset - cache.stride[1])):
            if row.offset == place:
                facts = {"slot": slot, "cache": cache.name, "start": start_of(row)}
                return "padding_slot", facts, [replace(row, shape=(0, *row.shape[1:]))]
    return None


def scales_behind_all_data(state: Mapping[str, View], name: str) -> Proposal | None:
    """Propose scales in their blocks, if a pool has all data first and all scales after the data."""
    storage = state[name].storage
    near = [view for view in state.values() if view.storage == storage and view.shape and view.num_elements]
    dense = [view for view in near if steps_of(view)[0] == _page_bytes(view)]
    regions: dict[tuple[int, int], View] = {}  # scales by number of blocks and first byte
    for scale in (view for view in dense if view.role == "scale"):
        regions.setdefault((scale.shape[0], start_of(scale)), scale)
    for data in (view for view in dense if view.role == "data"):
        scale = regions.get((data.shape[0], start_of(data) + data.shape[0] * _page_bytes(data)))
        if scale is None:
            continue
        data_page = _page_bytes(data)
        page = data_page + _page_bytes(scale)
        facts = {"start": start_of(scale), "belongs": start_of(data) + data_page, "taken": "pool",
                 "itemsize": scale.itemsize, "cell": page}  # fmt: skip
        return "scale_region", facts, [_placed(data, 0, page, start_of(data)),
                                       _placed(scale, 0, page, start_of(data) + data_page)]  # fmt: skip
    return None


def scales_of_a_block(state: Mapping[str, View], name: str) -> Proposal | None:
    """If scales lie in cells without room for them, propose places behind the data of their block.

    The reverse fits too.
    """
    near = [view for view in state.values() if view.storage == state[name].storage and view.num_elements]
    made, facts = [], {}
    by_shape: dict[tuple, list[View]] = {}
    for view in near:
        by_shape.setdefault(view.shape[:-1], []).append(view)
    pairs = ((data, scale) for scale in near if len(scale.shape) > 1 for data in by_shape.get(scale.shape, ()))
    for data, scale in pairs:
        spend(PAIR_COST)
        if data.stride[-1] != 1:
            continue
        cell, content = data.shape[-1] * data.itemsize, _page_bytes(data)
        cells, scales = _inner_step(data, data.shape[1:-1]), _inner_step(scale, scale.shape[1:])
        start, in_cells = start_of(data), tuple(step * data.itemsize for step in data.stride[:-1])
        dense = [scale.itemsize]
        for size in reversed(scale.shape[2:]):
            dense.insert(0, dense[0] * size)
        if cells == cell and scales == cell + scale.itemsize and start_of(scale) == start + cell:
            taken, start, steps = "block", start + content, (in_cells[0], *dense)
        elif cells == cell + scale.itemsize and scales == scale.itemsize:
            taken, start, steps = "region", start + cell, in_cells
        else:
            continue
        if any(number % scale.itemsize for number in (start, *steps)):
            continue
        stride = tuple(step // scale.itemsize for step in steps)
        facts = {"start": start_of(scale), "belongs": start, "taken": taken, "itemsize": scale.itemsize, "cell": cells}
        made.append(replace(scale, stride=stride, offset=start // scale.itemsize))
    return ("scale_region", facts, made) if made else None


def _inner_step(view: View, sizes: Sequence[int]) -> int:
    """Return the smallest step in bytes along the axes 1, 2, ... of these sizes."""
    steps = [abs(view.stride[axis]) * view.itemsize for axis, size in enumerate(sizes, 1) if size > 1]
    return min(steps, default=0)


def values_for_bytes(state: Mapping[str, View], name: str) -> Proposal | None:
    """If a view starts as many bytes after another view as a row there has values, propose the bytes of this row."""
    view = state[name]
    for one in state.values():
        spend(PAIR_COST)
        for before, after in ((view, one), (one, view)):
            if before.storage != after.storage or not before.shape or before.stride[-1] != 1:
                continue
            count, row = before.shape[-1] * before.values, before.shape[-1] * before.itemsize
            start = start_of(before) + row
            if count != row and start_of(after) - start_of(before) == count and start % after.itemsize == 0:
                facts = {"count": count, "bytes": row, "before": before.name}
                return "element_size", facts, [replace(after, offset=start // after.itemsize)]
    return None


def broadcast(state: Mapping[str, View], name: str) -> Proposal | None:
    """If an axis has the stride 0, propose that the program only reads through the view."""
    view = state[name]
    axes = [axis for axis, size in enumerate(view.shape) if size > 1 and view.stride[axis] == 0]
    return ("broadcast", {"axis": axis_name(view, axes[0])}, [replace(view, read_only=True)]) if axes else None


def _page_bytes(view: View) -> int:
    return view.num_elements // view.shape[0] * view.itemsize


_RULES = (padding_slot, scales_behind_all_data, scales_of_a_block, values_for_bytes, broadcast)
"""Rules that look at pairs of views, or at one view alone."""


def _proposals(state: dict[str, View], name: str) -> Iterator[Proposal]:
    """Yield repairs for the family of a view, the likeliest first."""
    yield from (found for rule in _RULES if (found := rule(state, name)))
    view, around = state[name], Surroundings(state)
    family = around.family(name)
    axis = block_axis(view)
    if axis is None:
        return
    step, size = abs(steps_of(view)[axis]), view.shape[axis]
    content = around.content_bytes(view)
    starts = [start_of(one) for one in family]
    yield from _odd_one(family)
    if len(family) > 1 and len(set(starts)) < len(starts):
        pages = [content, step // len(family) if step % len(family) == 0 else 0, step * size]
        for page in dict.fromkeys(page for page in pages if page):
            for stride in dict.fromkeys((step, page * len(family))):
                facts = {"views": len(family), "start": starts[0], "belongs": page}
                placed = [_placed(one, axis, stride, starts[0] + n * page) for n, one in enumerate(family)]
                yield "one_base", facts, placed
    for itemsize in {view.itemsize} - {1}:
        facts = {"itemsize": itemsize, "taken": "bytes for elements", "what": "strides and offset"}
        if all(number % itemsize == 0 for number in (*view.stride[: len(view.stride) - 1], view.offset)):
            for one in [family, [view]]:
                yield "element_size", facts, [_divided(v, itemsize) for v in one]
    page, layers = around.page(view)
    whole = view.storage.nbytes // size if size and view.storage.nbytes % size == 0 else 0
    span = max(starts) - min(starts) + content
    candidates = {
        "layer_count": page * layers if layers > 1 else 0,
        "from_shape": span if len(family) > 1 else 0,
        "padding_left_out": whole,
    }
    fits = {
        "layer_count": bool(page) and step % page == 0,
        "from_shape": step in (content, page, _page_bytes(view)),
        "padding_left_out": step < whole,
    }
    for cause, better in candidates.items():
        if better and better != step:
            if not fits[cause]:
                facts = {"what": "step along block", "is": step, "belongs": better}
                yield "other_number", facts, [_placed(one, axis, better, start_of(one)) for one in family]
                continue
            facts = {"step": step, "belongs": better, "page": page, "layers": len(family), "content": content,
                     "counted": step // page if page else 0, "factor": better // step if step else 0,
                     "axis": "block"}  # fmt: skip
            yield cause, facts, [_placed(one, axis, better, start_of(one)) for one in family]


def _odd_one(family: Sequence[View]) -> Iterator[Proposal]:
    """If all views of a family but one start at equal distances, propose this distance for the one.

    At least three other views are needed, because any two starts have one distance.
    """
    starts = [start_of(one) for one in family]
    spend(len(starts) ** 2)
    for number, view in enumerate(family):
        others = [(n, start) for n, start in enumerate(starts) if n != number]
        if len(others) < 3:
            return
        (first, start), (second, later) = others[:2]
        apart, rest = divmod(later - start, second - first)
        belongs = start + (number - first) * apart
        if rest or apart == 0 or any(there != start + (n - first) * apart for n, there in others):
            continue
        if belongs == starts[number] or belongs % view.itemsize or belongs < 0:
            continue
        repaired = replace(view, offset=belongs // view.itemsize)
        if starts[number] in (0, min(there for _, there in others)):
            yield "offset_dropped", {"start": starts[number], "belongs": belongs}, [repaired]
        else:
            yield "other_number", {"what": "start", "is": starts[number], "belongs": belongs}, [repaired]


def _placed(view: View, axis: int, step: int, start: int) -> View:
    """Return the view with another block step and start, both in bytes. All other numbers stay as they are."""
    if step % view.itemsize or start % view.itemsize:
        return view
    stride = tuple(step // view.itemsize if n == axis else old for n, old in enumerate(view.stride))
    return replace(view, stride=stride, offset=start // view.itemsize)


def _divided(view: View, itemsize: int) -> View:
    """Return the view with strides and offset divided by the size of an element."""
    stride = tuple(step // itemsize if n < len(view.stride) - 1 or step % itemsize == 0 else step
                   for n, step in enumerate(view.stride))  # fmt: skip
    return replace(view, stride=stride, offset=view.offset // itemsize)
