"""Defines the modes of a KV cache. There is one record per mode, and a mode is a value of vLLM's ``kv_cache_dtype``.

For example, the mode ``fp8_per_token_head`` stores one byte per element and one float32 scale per cell. All other code
reads such facts from the record. For example, ``get_mode("fp8_per_token_head").scale_bytes`` is 4. The module
``kvviz.cache.codes`` encodes and decodes cells. JavaScript gets the facts of a record from :meth:`Mode.as_data`.

To add a mode, add a line to ``_ALL``. If the mode has a new kind of code, also add a line to :data:`CODES`.
"""

import math
from dataclasses import dataclass

from kvviz.audit.arguments import one_of

ZERO_POINT_MASK = 0xF
"""In a mode with zero points, the lowest four bits of a scale hold the zero point, as in vLLM."""


@dataclass(frozen=True)
class Code:
    """One kind of code. A code is the number that a cache stores for one element.

    Attributes:
        bits: the size of one code in bits, which is 16, 8 or 4.
        largest: the largest code. The scale maps the largest element of a cell to this code. It is 0.0 for a kind of
            code that never has a scale.
        label: the text that a picture shows for the codes of a cell.
        values: ``values[c]`` is the number of the code with the bits ``c``, without zero point and scale. For bfloat16
            it is empty.
    """

    bits: int
    largest: float
    label: str
    values: tuple[float, ...] = ()


def _float_values(exponent_bits: int, mantissa_bits: int) -> tuple[float, ...]:
    """Return the value of every code of a small float format. The format has a sign bit, and no infinity.

    For e4m3 (4 bits of exponent, 3 bits of mantissa), the bias of the exponent is 7. If all bits except the sign are 1,
    the code is NaN.
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
"""All kinds of code by name. In torch, ``e4m3`` is called ``float8_e4m3fn``. ``int4`` codes are unsigned, 0 to 15."""

SCALE_BYTES = {"": 0, "float32": 4, "float16": 2}
"""The size of one scale in bytes, by the name of its dtype in torch. The empty name means that cells have no scale."""


@dataclass(frozen=True)
class Mode:
    """One way to store the elements of a cell.

    Attributes:
        name: the value of vLLM's ``kv_cache_dtype``.
        code: the kind of code, a name in :data:`CODES`.
        scale_dtype: the name in torch of the dtype of a scale. It is "" if cells have no scale. vLLM 0.20 to 0.33 uses
            float32.
        scale_label: the text that a picture shows for a scale. In a mode without scales, it says why there are none.
        rotated: True if the elements of a cell are rotated before they are quantised.
        has_zero_point: True if the lowest four bits of a scale hold a zero point.

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
        """Return the size of one code in bits."""
        return CODES[self.code].bits

    @property
    def code_label(self) -> str:
        """Return the text that a picture shows for the codes of a cell."""
        return CODES[self.code].label

    def codes_in(self, byte: int) -> tuple[float, ...]:
        """Return the number that each code of a byte stands for. If a byte has two codes, the code in the low four bits
        comes first."""
        values = CODES[self.code].values
        return (values[byte],) if self.codes_per_byte == 1 else (values[byte & 15], values[byte >> 4])

    @property
    def can_decode_bytes(self) -> bool:
        """Return True if :meth:`codes_in` works for this mode. This needs codes of at most 8 bits."""
        return bool(CODES[self.code].values)

    @property
    def largest_code(self) -> float:
        """Return the largest code. The scale of a cell maps the largest element of the cell to this code."""
        return CODES[self.code].largest

    @property
    def scale_bytes(self) -> int:
        """Return the size of the scale of one cell in bytes. It is 0 in a mode without scales."""
        return SCALE_BYTES[self.scale_dtype]

    @property
    def is_per_token_head(self) -> bool:
        """Return True if each cell has its own scale inside the cache."""
        return self.scale_bytes > 0

    @property
    def codes_per_byte(self) -> int:
        """Return how many codes one byte holds. It is 2 for codes of 4 bits, otherwise 1."""
        return max(1, 8 // self.code_bits)

    @property
    def element_bytes(self) -> int:
        """Return the size of one element of the KV view in bytes. It is 2 for bfloat16, otherwise 1."""
        return max(1, self.code_bits // 8)

    @property
    def zero_point_mask(self) -> int:
        """Return 15 if the lowest four bits of a scale hold the zero point. Otherwise return 0."""
        return ZERO_POINT_MASK if self.has_zero_point else 0

    def as_data(self) -> dict:
        """Return the facts that a decoder in JavaScript needs, as a dict for JSON. NaN becomes None."""
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
"""All modes by name. In vLLM, the value ``auto`` means ``bfloat16`` for a bfloat16 model."""


def get_mode(mode: "str | Mode") -> Mode:
    """Return the mode with this name. If the argument is a Mode, return the argument.

    Raises:
        ValueError: no mode has this name. The message contains the nearest name.
    """
    return mode if isinstance(mode, Mode) else MODES[one_of("kv_cache_dtype", mode, tuple(MODES))]
