"""Converts sizes of types that store several values together. Example: int4 stores 2 values in one byte.

People count values, for example 128 values of q8_0 in a row. A :class:`~kvviz.audit.view.View` counts elements. An
element is the smallest group of values that fills whole bytes. In q8_0, an element is 32 values in 34 bytes. So a row
of 128 values is a view of 4 elements of 34 bytes. The values of an element are neighbours along one axis. All strides
and offsets must be whole elements.
"""

PACKED = {
    **{f"{kind}{bits}": (1, 8 // bits) for kind in ("int", "uint") for bits in (1, 2, 4)},
    **{f"{kind}{bits}": (bits, 8) for kind in ("int", "uint") for bits in (3, 5, 6, 7)},
    "float4_e2m1fn": (1, 2),
    "q4_0": (18, 32), "q4_1": (20, 32), "q5_0": (22, 32), "q5_1": (24, 32), "q8_0": (34, 32),
    "iq4_nl": (18, 32), "mxfp4": (17, 32),
}  # fmt: skip
"""``{name of the type: (bytes of one element, values of one element)}``. The names with q come from llama.cpp."""

Numbers = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a view, all in one unit: values, elements or bytes."""


def packed_axis(shape: tuple[int, ...], stride: tuple[int, ...]) -> int | None:
    """Return the axis along which the values of an element are neighbours. Shape and stride count elements.

    This axis has stride 1. If several axes have stride 1, an axis of size 1 is taken. If no axis has stride 1, the
    result is None.
    """
    ones = [axis for axis, step in enumerate(stride) if step == 1]
    return ([axis for axis in ones if shape[axis] == 1] or ones or [None])[-1]


def elements_of(numbers: Numbers, per_element: int, unit: str = "values") -> Numbers:
    """Convert shape, strides and offset from values (or bytes) to elements.

    Args:
        per_element: number of values (or bytes) in one element.
        unit: the unit of ``numbers``, for messages.

    Raises:
        ValueError: a number is not a whole number of elements.
    """
    shape, stride, offset = numbers
    ones = [axis for axis, step in enumerate(stride) if step == 1]
    axis = ([axis for axis in ones if shape[axis] != 1] or ones or [None])[-1]
    if axis is None:
        raise ValueError(f"no axis has stride 1, but {per_element} {unit} that lie side by side are one element")
    others = [("stride", step) for n, step in enumerate(stride) if n != axis and shape[n] > 1]
    for what, number in ((f"the size of axis {axis}", shape[axis]), *others, ("the offset", offset)):
        if number % per_element:
            what = "a stride" if what == "stride" else what
            raise ValueError(
                f"{what} is {number}, which is not a multiple of {per_element}: {per_element} {unit} are one element, "
                f"and a view has whole elements"
            )
    size = tuple(n // per_element if i == axis else n for i, n in enumerate(shape))
    steps = (1 if i == axis else 0 if shape[i] == 1 else s // per_element for i, s in enumerate(stride))
    return size, tuple(steps), offset // per_element


def values_of(numbers: Numbers, values: int) -> Numbers | None:
    """Convert shape, strides and offset from elements to values. If no axis has stride 1, return None."""
    shape, stride, offset = numbers
    axis = packed_axis(shape, stride)
    if axis is None:
        return None
    size = tuple(n * values if i == axis else n for i, n in enumerate(shape))
    return size, tuple(1 if i == axis else s * values for i, s in enumerate(stride)), offset * values
