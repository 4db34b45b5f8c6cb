"""The modes in which a KV cache stores its elements: one record per value of vLLM's ``kv_cache_dtype``.

For example, the mode ``fp8_per_token_head`` stores one byte per element and one float32 scale per cell. All other
code reads such facts from the record: ``get_mode("fp8_per_token_head").scale_bytes`` is 4. ``kvviz.cache.codes``
encodes and decodes cells; JavaScript gets the record as data from :meth:`Mode.as_data`.

To add a mode, add a line to ``_ALL``. If the mode has a new kind of code, add a line to :data:`CODES` as well.
"""

import math
from dataclasses import dataclass

from kvviz.audit.arguments import one_of

ZERO_POINT_MASK = 0xF
"""The bits of a scale that hold the zero-point, in a mode that has one: vLLM takes the lowest four."""


@dataclass(frozen=True)
class Code:
    """One kind of code: the number that a cache stores for one element.

    Attributes:
        bits: the size of one code in bits: 16, 8 or 4.
        largest: the largest code. A cell's scale maps the largest element of the cell to this code. 0.0 if the code
            never has a scale.
        label: the words that a picture writes on the codes of a cell.
        values: the number that each code stands for, before zero-point and scale, by the bits of the code. Empty for
            bfloat16, whose elements are not decoded one by one.
    """

    bits: int
    largest: float
    label: str
    values: tuple[float, ...] = ()


def _float_values(exponent_bits: int, mantissa_bits: int) -> tuple[float, ...]:
    """Return the value of every code of a small float without infinity: sign, exponent, mantissa.

    For e4m3 (4 and 3 bits) the exponent's bias is 7, and the code with all bits set is NaN.
    """
    bias, half = 2 ** (exponent_bits - 1) - 1, 1 << mantissa_bits
    sizes = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, half)
        sizes.append((half * (exponent > 0) + mantissa) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits))
    if exponent_bits + mantissa_bits == 7:
        sizes[-1] = math.nan
    return (*sizes, *(-size for size in sizes))


CODES = {
    "bfloat16": Code(16, 0.0, "bfloat16 elements, 2 bytes each"),
    "e4m3": Code(8, 448.0, "fp8 e4m3 codes, 1 byte each", _float_values(4, 3)),
    "int8": Code(8, 127.0, "int8 codes, 1 byte each", (*range(128), *range(-128, 0))),
    "int4": Code(4, 15.0, "int4 codes, two in a byte", tuple(range(16))),
}
"""Every kind of code by name. ``e4m3`` is torch's ``float8_e4m3fn``. ``int4`` is unsigned: 0 to 15."""

SCALE_BYTES = {"": 0, "float32": 4, "float16": 2}
"""Bytes of one scale, by torch's name of its dtype. The empty name means that a cell has no scale."""


@dataclass(frozen=True)
class Mode:
    """One way to store the elements of a cell.

    Attributes:
        name: the value of vLLM's ``kv_cache_dtype``.
        code: the name of its kind of code in :data:`CODES`.
        scale_dtype: torch's name of the dtype of a cell's scale, or "" if a cell has no scale. vLLM 0.20 to 0.33
            uses float32.
        scale_label: the words that a picture writes on a scale. For a mode without scales: a sentence that says why.
        rotated: True if the elements of a cell are rotated before they are quantised.
        has_zero_point: True if the lowest four bits of a scale hold a zero-point.

    Raises:
        ValueError: the kind of code or the dtype of the scale does not exist.
    """

    name: str
    code: str
    scale_dtype: str = ""
    scale_label: str = ""
    rotated: bool = False
    has_zero_point: bool = False

    def __post_init__(self) -> None:
        one_of("code", self.code, tuple(CODES))
        one_of("scale_dtype", self.scale_dtype, tuple(SCALE_BYTES))

    @property
    def code_bits(self) -> int:
        """Bits of one code."""
        return CODES[self.code].bits

    @property
    def code_label(self) -> str:
        """The words that a picture writes on the codes of a cell."""
        return CODES[self.code].label

    def codes_in(self, byte: int) -> tuple[float, ...]:
        """Return the numbers that the codes in one byte stand for: one, or two with the low four bits first."""
        values = CODES[self.code].values
        return (values[byte],) if self.codes_per_byte == 1 else (values[byte & 15], values[byte >> 4])

    @property
    def can_decode_bytes(self) -> bool:
        """True if :meth:`codes_in` works for this mode: its codes have at most 8 bits."""
        return bool(CODES[self.code].values)

    @property
    def largest_code(self) -> float:
        """The largest code. The scale of a cell maps the largest element to this code."""
        return CODES[self.code].largest

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one cell: 4 for float32, 0 for a mode without scales."""
        return SCALE_BYTES[self.scale_dtype]

    @property
    def is_per_token_head(self) -> bool:
        """True if each cell has a scale of its own inside the cache."""
        return self.scale_bytes > 0

    @property
    def codes_per_byte(self) -> int:
        """Codes in one byte: 2 for codes of 4 bits, else 1."""
        return max(1, 8 // self.code_bits)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the KV view: 2 for bfloat16, 1 for every quantised mode."""
        return max(1, self.code_bits // 8)

    @property
    def zero_point_mask(self) -> int:
        """The bits of a scale that hold the zero-point: 15, or 0 for a mode without a zero-point."""
        return ZERO_POINT_MASK if self.has_zero_point else 0

    def as_data(self) -> dict:
        """Return what a decoder needs as a plain dict, which JSON can hold: JavaScript gets this dict. NaN is None."""
        values = CODES[self.code].values if self.is_per_token_head else ()
        return {
            "name": self.name,
            "code": self.code,
            "values": [None if math.isnan(value) else value for value in values],
            "codes_per_byte": self.codes_per_byte,
            "scale_bytes": self.scale_bytes,
            "scale_dtype": self.scale_dtype,
            "zero_point_mask": self.zero_point_mask,
            "rotated": self.rotated,
        }


_ALL = (
    Mode("bfloat16", "bfloat16", scale_label="bfloat16 needs no scale."),
    Mode("fp8", "e4m3", scale_label="fp8 has one scale for the whole tensor, kept outside the cache."),
    Mode("int8_per_token_head", "int8", "float32", "fp32"),
    Mode("fp8_per_token_head", "e4m3", "float32", "fp32"),
    Mode(
        "int4_per_token_head",
        "int4",
        "float32",
        "fp32; its 4 lowest bits hold the zero-point",
        rotated=True,
        has_zero_point=True,
    ),
)

MODES = {mode.name: mode for mode in _ALL}
"""Every mode by name. vLLM's ``auto`` for a bfloat16 model is ``bfloat16``."""


def get_mode(mode: "str | Mode") -> Mode:
    """Return the mode of that name. A Mode is returned as it is.

    Raises:
        ValueError: the mode does not exist. The message names the nearest one.
    """
    return mode if isinstance(mode, Mode) else MODES[one_of("kv_cache_dtype", mode, tuple(MODES))]
