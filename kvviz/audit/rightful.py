"""Reads from the claims where views belong, and which view therefore owns which bytes.

Example: ``Follows("K scale", "K data", 128)`` says that each K scale belongs 128 bytes after the start of its data
cell. These places are the *rightful places* of "K scale". A *rightful map* is a view of the rightful places. The audit
compares "K scale" with its rightful map. In byte maps, the rightful map is the owner of its bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvviz.audit.claims import BelongsAt, Claim, Covers, Follows, names_in
from kvviz.audit.view import View


@dataclass(frozen=True)
class RightfulPlaces:
    """What the claims of an audit say about places.

    Attributes:
        placed: for each claim about places, the view and its rightful map. Here, the map has the name and the shape of
            the view: see :func:`starts_map`.
        moved: ``{view name: rightful map}`` for each view that such a claim is about.
        references: names of views that are used only as rightful maps.
        extents: names of views that are used only as extents, for example the bytes that a transfer takes.
        owners: all views that own bytes. A view that is only read owns no bytes. If a view has a rightful map, the map
            is the owner and not the view. Here, the map has the name that ``own_names`` says.
        own_names: ``{view name: name of its rightful map among the owners}``.
        bytewise: ``{owner: view}`` for each owner with one more axis, for single bytes. The elements of the view belong
            at these bytes.
    """

    placed: dict[BelongsAt | Follows, tuple[View, View]]
    moved: dict[str, View]
    references: frozenset[str]
    extents: frozenset[str]
    owners: tuple[View, ...]
    own_names: dict[str, str]
    bytewise: dict[View, View]


def rightful_places(views: Sequence[View], claims: Sequence[Claim]) -> RightfulPlaces:
    """Collect the rightful maps of all claims about places, and all owners of bytes.

    Raises:
        ValueError: a claim names a view that was not given, or its views do not fit together.
    """
    named = {view.name: view for view in views}
    placed, moved, own_names = {}, {}, {}
    for claim in claims:
        if isinstance(claim, BelongsAt | Follows):
            name = claim.view if isinstance(claim, BelongsAt) else claim.scale
            view, rightful = view_named(named, name), rightful_place(claim, named)
            placed[claim], moved[name] = (view, starts_map(view, rightful)), rightful
            own_names[name] = _own_name(claim, named)
    given_by_name = {c.rightful for c in claims if isinstance(c, BelongsAt) and isinstance(c.rightful, str)}
    references = frozenset(given_by_name - moved.keys())
    extents = frozenset(name for claim in claims if isinstance(claim, Covers) for name in names_in(claim.extent))
    aside = moved.keys() | references | extents | {view.name for view in views if view.read_only}
    others = [view for view in views if view.name not in aside]
    maps = [replace(rightful, name=own_names[name]) for name, rightful in moved.items()]
    owners = dict.fromkeys((*others, *maps))  # two views may belong at one place
    bytewise = {one: named[name] for one, name in zip(maps, moved, strict=True) if one.shape != named[name].shape}
    return RightfulPlaces(placed, moved, references, extents, tuple(owners), own_names, bytewise)


def _own_name(claim: BelongsAt | Follows, named: dict[str, View]) -> str:
    """Return the name of a rightful map among the owners.

    A claim ``Follows`` has no rightful view, so the map gets the name of the scale view. A claim ``BelongsAt`` has a
    rightful view, so the map gets the name of this view. If another view already has this name, the map gets the name
    of the claimed view.
    """
    if isinstance(claim, Follows):
        return claim.scale
    if isinstance(claim.rightful, str):
        return claim.rightful
    other = named.get(claim.rightful.name, claim.rightful)
    return claim.rightful.name if other == claim.rightful else claim.view


def rightful_place(claim: BelongsAt | Follows, named: dict[str, View]) -> View:
    """Return the rightful map of a claim, with the name of the claimed view.

    Args:
        named: the views of the audit by name.

    Raises:
        ValueError: a view is missing, or the scale view does not have one element per data cell.
    """
    if isinstance(claim, BelongsAt):
        given = claim.rightful if isinstance(claim.rightful, View) else view_named(named, claim.rightful)
        return replace(given, name=claim.view)
    scale, data = view_named(named, claim.scale), view_named(named, claim.data)
    cells, size = data.shape[:-1], scale.itemsize
    counts_bytes = scale.shape[:-1] == cells and size == 1 and scale.stride[-1:] == (1,)
    if scale.shape != cells and not counts_bytes:
        raise ValueError(
            f"{scale.name} must have one element per cell of {data.name}: shape {cells}, but it has shape {scale.shape}"
        )
    stride = tuple(step * data.itemsize for step in data.stride[:-1])
    offset = data.offset * data.itemsize + claim.at_bytes
    if scale.shape == cells and not any(number % size for number in (*stride, offset)):
        stride = tuple(step // size for step in stride)
        return replace(scale, storage=data.storage, stride=stride, offset=offset // size)
    # Strides count elements. If a place is not a multiple of a scale's size, the map has one more axis, for bytes.
    shape = scale.shape if counts_bytes else (*cells, size)
    axes = scale.axes if counts_bytes or not scale.axes else (*scale.axes, "byte")
    return replace(
        scale, storage=data.storage, shape=shape, stride=(*stride, 1), offset=offset, itemsize=1, axes=axes, values=1
    )


def starts_map(view: View, rightful: View) -> View:
    """Return the rightful map with the shape of the view. In the result, only the starts of elements have a meaning.

    A rightful map may have one more axis than the view, for the single bytes of an element. This axis is removed.
    """
    if rightful.shape == (*view.shape, view.itemsize) and rightful.itemsize == 1 and rightful.stride[-1] == 1:
        return replace(rightful, shape=view.shape, stride=rightful.stride[:-1], axes=view.axes)
    return rightful


def view_named(named: dict[str, View], name: str) -> View:
    """Return the view of that name. Raise a ValueError if a claim names a view that was not given."""
    if name not in named:
        raise ValueError(f"a claim names the view {name!r}, which is not among the {len(named)} views given")
    return named[name]
