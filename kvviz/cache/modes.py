"""The modes that a KV cache can be stored in: one record for each value of vLLM's ``kv_cache_dtype``.

A mode says how many bits a code has, whether each cell carries a scale, and what people call it. For example,
``fp8_per_token_head`` keeps one byte per element and one float32 scale per cell. Everything else asks the record:
``get_mode("fp8_per_token_head").scale_bytes`` is 4. ``kvviz.cache.codes`` encodes and decodes cells of each mode.
"""

from dataclasses import dataclass

from kvviz.audit.arguments import one_of


@dataclass(frozen=True)
class Mode:
    """One way to store the elements of a cell.

    Attributes:
        name: the value of vLLM's ``kv_cache_dtype``.
        code: how the bits of one code are read: ``bfloat16``, ``e4m3`` (float8_e4m3fn), ``int8`` or ``int4``.
        code_bits: bits of one code.
        code_label: what a picture writes on the codes of a cell, in words.
        scale_dtype: torch's name of the scale's type, or "" if a cell carries no scale.
        scale_bytes: bytes of the scale of one cell; 0 without one (float32 in vLLM 0.20 to 0.33).
        scale_label: what a picture writes on a scale; for a mode without one, a sentence that says why.
        rotated: True if the elements of a cell are rotated before they are quantised.
        has_zero_point: True if the four lowest bits of the scale hold a zero-point.
    """

    name: str
    code: str
    code_bits: int
    code_label: str
    scale_dtype: str = ""
    scale_bytes: int = 0
    scale_label: str = ""
    rotated: bool = False
    has_zero_point: bool = False

    @property
    def is_per_token_head(self) -> bool:
        """True if each cell (token and head, K or V) carries a scale of its own inside the cache."""
        return self.scale_bytes > 0

    @property
    def codes_per_byte(self) -> int:
        """Codes in one byte: 2 for int4, else 1."""
        return max(1, 8 // self.code_bits)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the KV view: 2 for bfloat16, 1 for every quantised mode."""
        return max(1, self.code_bits // 8)


_ALL = (
    Mode("bfloat16", "bfloat16", 16, "bfloat16 elements, 2 bytes each", scale_label="bfloat16 needs no scale."),
    Mode(
        "fp8",
        "e4m3",
        8,
        "fp8 e4m3 codes, 1 byte each",
        scale_label="fp8 has one scale for the whole tensor, kept outside the cache.",
    ),
    Mode("int8_per_token_head", "int8", 8, "int8 codes, 1 byte each", "float32", 4, "fp32"),
    Mode("fp8_per_token_head", "e4m3", 8, "fp8 e4m3 codes, 1 byte each", "float32", 4, "fp32"),
    Mode(
        "int4_per_token_head",
        "int4",
        4,
        "int4 codes, two in a byte",
        "float32",
        4,
        "fp32; its 4 lowest bits hold the zero-point",
        rotated=True,
        has_zero_point=True,
    ),
)

MODES = {mode.name: mode for mode in _ALL}
"""Every mode by name. vLLM's ``auto`` for a bfloat16 model is ``bfloat16``."""


def get_mode(name: str) -> Mode:
    """Return the mode of that name. Raises ValueError, which suggests the nearest name, if there is none."""
    return MODES[one_of("kv_cache_dtype", name, tuple(MODES))]
