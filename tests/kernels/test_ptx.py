"""Test the PTX functions against their twins in ``codec``, for every float32 and for every word of codes."""

import pytest
import torch

from kvviz.cache.modes import MODES
from kvviz.kernels import codec
from kvviz.kernels.codec import tl, triton

CHUNK, ROWS, WIDE = 1 << 28, 32, 64


@pytest.fixture
def instructions() -> None:
    if not codec.uses_ptx(torch.device("cuda")):
        pytest.skip("GPUs before sm_89 do not have these instructions")


@triton.jit
def _every_code(
    wrong_ptr, first, inverse, zero_point, ROWS: tl.constexpr, WIDE: tl.constexpr, CODE: tl.constexpr
):  # fmt: skip
    number = first + tl.program_id(0) * ROWS * WIDE
    number = number + tl.reshape(tl.arange(0, ROWS * WIDE), (1, ROWS, WIDE))
    x = number.to(tl.int32).to(tl.float32, bitcast=True)
    x = tl.where(codec.finite(x), x, 0.0)
    good, one = tl.full((ROWS,), 1, tl.int1), tl.full((ROWS,), 1.0, tl.float32)
    ours = codec.codes_of(x, one * inverse, one * zero_point, good, 1, ROWS, WIDE, CODE, True)
    twin = codec.codes_of(x, one * inverse, one * zero_point, good, 1, ROWS, WIDE, CODE, False)
    wrong = (ours.to(tl.int32) & 255) != (twin.to(tl.int32) & 255)
    tl.atomic_add(wrong_ptr, tl.sum(wrong.to(tl.int32).reshape(wrong.numel), axis=0))


@triton.jit
def _every_bfloat16(wrong_ptr, first, SIZE: tl.constexpr):
    number = first + tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = number.to(tl.int32).to(tl.float32, bitcast=True)
    ours, twin = codec.rounded_to(x, tl.bfloat16, True), codec.rounded_to(x, tl.bfloat16, False)
    wrong = (ours.to(tl.int32, bitcast=True) != twin.to(tl.int32, bitcast=True)) & (x == x)
    wrong = wrong | ((ours == ours) != (x == x))
    tl.atomic_add(wrong_ptr, tl.sum(wrong.to(tl.int32), axis=0))


@triton.jit
def _every_word(ours_ptr, twin_ptr, SIZE: tl.constexpr, CODE: tl.constexpr):
    word = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ours = codec.word_values(word.to(tl.int16), CODE, True)
    twin = codec.word_values(word.to(tl.int16), CODE, False)
    for part in tl.static_range(len(ours)):
        tl.store(ours_ptr + part * 65536 + word, ours[part].to(tl.float32))
        tl.store(twin_ptr + part * 65536 + word, twin[part])


@triton.jit
def _largest(x_ptr, ours_ptr, twin_ptr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    row = tl.arange(0, ROWS)
    x = tl.load(x_ptr + row[None, :, None] * WIDE + tl.arange(0, WIDE)[None, None, :])
    tl.store(ours_ptr + row, codec.row_maximum(x, 1, ROWS, True))
    tl.store(twin_ptr + row, codec.row_maximum(x, 1, ROWS, False))


@pytest.mark.gpu
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(("inverse", "zero_point"), [(1.0, 0.0), (0.37, 7.0), (211.0, 15.0)])
@pytest.mark.parametrize("code", sorted({mode.code for mode in MODES.values() if mode.is_per_token_head}))
def test_codes_of_every_float32(code, inverse, zero_point):
    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    for first in range(0, 1 << 32, CHUNK):
        _every_code[(CHUNK // (ROWS * WIDE),)](
            wrong, first, inverse, zero_point, ROWS=ROWS, WIDE=WIDE, CODE=code, enable_fp_fusion=False
        )
    assert wrong.item() == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("instructions")
def test_bfloat16_of_every_float32():
    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    for first in range(0, 1 << 32, CHUNK):
        _every_bfloat16[(CHUNK // 4096,)](wrong, first, SIZE=4096)
    assert wrong.item() == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("code", codec.SUPPORTED_CODES)
def test_values_of_every_word(code):
    ours, twin = torch.full((2, 4, 1 << 16), -1.0, device="cuda")
    _every_word[(64,)](ours, twin, SIZE=1024, CODE=code)
    nan = twin.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours.masked_fill(nan, 0).view(torch.int32), twin.masked_fill(nan, 0).view(torch.int32))
    assert len(twin[0].unique()) > 15


@pytest.mark.gpu
@pytest.mark.usefixtures("instructions")
def test_the_maximum_shows_a_row_that_is_not_finite():
    x = torch.randn(16, 64, device="cuda").abs()
    for row, value in ((3, "nan"), (7, "inf"), (15, "nan")):
        x[row, row] = float(value)
    ours, twin = torch.zeros(2, 16, device="cuda")
    _largest[(1,)](x, ours, twin, ROWS=16, WIDE=64)
    assert torch.equal(ours.isfinite(), twin.isfinite()) and (~ours.isfinite()).nonzero().ravel().tolist() == [3, 7, 15]
    assert torch.equal(ours[ours.isfinite()], twin[ours.isfinite()])


def test_the_interpreter_and_older_gpus_run_the_twins(monkeypatch):
    """``uses_ptx`` alone decides between a function and its twin."""
    monkeypatch.setattr(codec, "RUNTIME", "interpreter")
    assert codec.uses_ptx.__wrapped__(torch.device("cpu")) is False
    monkeypatch.setattr(codec, "RUNTIME", "gpu")
    for capability, expected in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert codec.uses_ptx.__wrapped__(torch.device("cuda")) is expected
