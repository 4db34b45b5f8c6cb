"""CacheSpec: the size and the mode of one KV cache, and the number of bytes of each of its parts.

There are three page sizes. To confuse two of them is a bug that vLLM had (PR 48411):

* ``real_page_size_bytes`` counts the data of K and V alone, without scales;
* ``content_page_size_bytes`` counts data and tails (the scales);
* ``page_size_bytes`` is the step from one page to the next, with padding.
"""

from dataclasses import dataclass

from kvviz.audit.arguments import positive_int
from kvviz.cache.modes import Mode, get_mode

_COUNTS = ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_size")


@dataclass(frozen=True)
class CacheSpec:
    """Size and mode of a KV cache. All sizes are in bytes.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_size: vLLM's words, each an integer of at least 1.
        kv_cache_dtype: the name of a mode in ``kvviz.cache.modes.MODES``. A Mode is replaced by its name. The
            per-token-head modes have one scale per cell: ``int8_per_token_head``, ``fp8_per_token_head`` and
            ``int4_per_token_head``.
        tail: True if each cell has room for its scale after its data. False gives the buffer of vLLM issue 48412,
            shape ``(176452, 2, 24, 2, 16, 64)``: a cell has only ``data_bytes``, and the scale's place is the last
            four *data* bytes. A mode without scales has no tail in either case.
        page_size_padded: the step from one page to the next in bytes, or None for no padding.

    Raises:
        ValueError: a value is out of range. The message has the value and says what would be right.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    kv_cache_dtype: str = "fp8_per_token_head"
    tail: bool = True
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            self._keep_positive_int(name)
        mode = get_mode(self.kv_cache_dtype)
        object.__setattr__(self, "kv_cache_dtype", mode.name)
        if not isinstance(self.tail, bool):
            raise ValueError(f"tail must be True or False, not {self.tail!r}")
        if self.head_size % mode.codes_per_byte:
            raise ValueError(
                f"{mode.name} packs {mode.codes_per_byte} elements into a byte, so head_size must be a multiple of "
                f"{mode.codes_per_byte}, not {self.head_size}"
            )
        if self.is_per_token_head:
            self._check_scale_alignment()
        if self.page_size_padded is not None:
            self._check_padding()

    def _keep_positive_int(self, name: str) -> None:
        """Check a count and keep it as a Python int: products of NumPy integers can overflow without an error."""
        object.__setattr__(self, name, positive_int(name, getattr(self, name)))

    def _check_scale_alignment(self) -> None:
        if self.data_bytes % self.scale_bytes:
            raise ValueError(
                f"the scale would start {self.data_bytes} bytes into its cell, which is not a multiple of its "
                f"{self.scale_bytes} bytes: choose another head_size than {self.head_size} for {self.kv_cache_dtype}"
            )
        if not self.tail and self.data_bytes <= self.scale_bytes:
            raise ValueError(
                f"a cell of {self.data_bytes} bytes without a tail has no byte left for data, because its scale takes "
                f"{self.scale_bytes}: choose a larger head_size than {self.head_size}, or tail=True"
            )

    def _check_padding(self) -> None:
        self._keep_positive_int("page_size_padded")
        if self.page_size_padded < self.content_page_size_bytes:
            raise ValueError(
                f"page_size_padded is {self.page_size_padded} bytes, but the content of a page takes "
                f"{self.content_page_size_bytes} bytes: pad to at least that"
            )
        step = max(self.element_bytes, self.scale_bytes)
        if self.page_size_padded % step:
            raise ValueError(
                f"page_size_padded is {self.page_size_padded} bytes: it must be a multiple of {step}, the size "
                f"of the widest number (element or scale) in mode {self.kv_cache_dtype}"
            )

    @property
    def mode(self) -> Mode:
        """The record of ``kv_cache_dtype``."""
        return get_mode(self.kv_cache_dtype)

    @property
    def is_per_token_head(self) -> bool:
        """True if each cell has a scale of its own inside the cache."""
        return self.mode.is_per_token_head

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the KV view: 2 for bfloat16, 1 for every quantised mode."""
        return self.mode.element_bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of the data of one cell."""
        return self.head_size * self.mode.code_bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one cell: 4 for float32, 0 if the mode has no scales."""
        return self.mode.scale_bytes

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell: the data and, with a tail, the scale."""
        return self.data_bytes + (self.scale_bytes if self.tail else 0)

    @property
    def scale_offset_bytes(self) -> int:
        """The byte of a cell at which its scale starts. The scale takes the cell's last bytes.

        Without a tail, these bytes are data bytes.
        """
        return self.cell_bytes - self.scale_bytes

    @property
    def cells_per_page(self) -> int:
        """Cells in one page. A token and head has two cells, one for K and one for V."""
        return 2 * self.block_size * self.num_kv_heads

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of K and V data in one page, without scales."""
        return self.cells_per_page * self.data_bytes

    @property
    def content_page_size_bytes(self) -> int:
        """Bytes of everything in one page, data and tails, without padding."""
        return self.cells_per_page * self.cell_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes from the start of one page to the start of the next: the content, or ``page_size_padded``."""
        return self.page_size_padded or self.content_page_size_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of all pages of one layer."""
        return self.num_blocks * self.page_size_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all pages of all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def num_slots(self) -> int:
        """Token slots of one layer. An entry of ``slot_mapping`` is at least 0 and less than this."""
        return self.num_blocks * self.block_size
