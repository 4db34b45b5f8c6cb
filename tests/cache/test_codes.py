"""The reference codes: error bounds, every e4m3 code, halves, the rotation, the zero point, and poisoned cells."""

import math
import struct
from fractions import Fraction

import pytest
import torch

from kvviz.cache.codes import SMALLEST_SCALE, decode, encode, rotate, rotation_run, rotation_signs, unrotate
from kvviz.cache.modes import MODES, Mode
from kvviz.cache.spec import CacheSpec

SCALED = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
HEAD_SIZES = (2, 6, 64, 80, 96, 112, 128)


def cells(head_size: int = 64, spread: float = 3.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(40, 3, head_size, generator=torch.Generator().manual_seed(head_size), dtype=torch.float64)
    return (drawn * spread).to(dtype)


def sylvester(run: int) -> torch.Tensor:
    """Return the Walsh-Hadamard matrix.

    An element is +1 if the numbers of its row and column have an even number of one bits in common. Otherwise it is -1.
    """
    signs = [[(-1.0) ** (row & column).bit_count() for column in range(run)] for row in range(run)]
    return torch.tensor(signs, dtype=torch.float64)


def e4m3(code: int) -> float:
    """Return the value of a code: 1 sign bit, 4 exponent bits with bias 7, 3 mantissa bits, no infinity."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def half_away(x: float) -> int:
    return int(math.copysign(math.floor(abs(Fraction(x)) + Fraction(1, 2)), x))


def bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES)
def test_shapes_and_dtypes(mode, dtype):
    x = cells(dtype=dtype)
    data, scale = encode(x, mode)
    assert data.dtype == torch.uint8 and tuple(data.shape) == (40, 3, CacheSpec(1, 1, 1, 1, 64, mode).data_bytes)
    assert (scale is not None) == MODES[mode].is_per_token_head
    if scale is not None:
        assert scale.dtype == getattr(torch, MODES[mode].scale_dtype) and tuple(scale.shape) == (40, 3)
    back = decode(data, scale, mode)
    assert back.dtype == torch.float32 and back.shape == x.shape


@pytest.mark.parametrize("spread", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("head_size", [64, 80, 128])
class TestRoundTrip:
    def test_bfloat16_keeps_eight_bits(self, head_size, spread):
        x = cells(head_size, spread)
        error = (decode(*encode(x, "bfloat16"), "bfloat16") - x).abs()
        assert bool((error <= x.abs() * 2.0**-8).all()) and error.max() > 0

    def test_fp8_keeps_four_bits(self, head_size, spread):
        x = cells(head_size, spread)
        error = (decode(*encode(x, "fp8"), "fp8") - x.clamp(-448, 448)).abs()
        assert bool((error <= (x.abs() * 2.0**-4).clamp(min=2.0**-10)).all())

    def test_fp8_per_token_head_keeps_four_bits_under_the_largest(self, head_size, spread):
        x = cells(head_size, spread)
        data, scale = encode(x, "fp8_per_token_head")
        error = (decode(data, scale, "fp8_per_token_head") - x).abs()
        allowed = torch.maximum(x.abs() * 2.0**-4, scale[..., None] * 2.0**-10) * (1 + 2.0**-20)
        assert bool((error <= allowed).all())
        assert torch.allclose(scale, x.abs().amax(-1) / 448, rtol=1e-6)

    def test_int8_is_half_a_step_off_at_most(self, head_size, spread):
        x = cells(head_size, spread)
        data, scale = encode(x, "int8_per_token_head")
        error = (decode(data, scale, "int8_per_token_head") - x).abs()
        assert bool((error <= scale[..., None] * (0.5 + 1e-4)).all())
        assert torch.allclose(scale, x.abs().amax(-1) / 127, rtol=1e-6)

    def test_int4_is_half_a_step_off_at_most_where_it_is_stored(self, head_size, spread):
        x = cells(head_size, spread)
        data, word = encode(x, "int4_per_token_head")
        stored = rotate(x)
        error = decode(data, word, "int4_per_token_head") - stored
        step = (stored.amax(-1) - stored.amin(-1)) / 15
        assert bool((error.abs() <= step[..., None] * (0.5 + 1e-3)).all())
        back = unrotate(decode(data, word, "int4_per_token_head")) - x
        run = rotation_run(head_size)
        assert torch.allclose(back.norm(dim=-1), error.norm(dim=-1) / run**0.5, rtol=1e-3)


def test_every_e4m3_code_has_its_value():
    got = decode(torch.arange(256, dtype=torch.uint8), None, "fp8").tolist()
    want = [e4m3(code) for code in range(256)]
    assert [math.isnan(x) for x in got] == [math.isnan(x) for x in want] == [code & 127 == 127 for code in range(256)]
    assert [x for x in got if x == x] == [x for x in want if x == x]
    assert math.copysign(1, got[128]) == -1


def test_every_e4m3_code_comes_back():
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    assert torch.equal(encode(decode(codes, None, "fp8"), "fp8")[0], codes)


def test_between_two_e4m3_codes_the_nearer_and_the_even_one_win():
    for code in range(126):
        low, high = e4m3(code), e4m3(code + 1)
        middle = torch.tensor((low + high) / 2)
        around = torch.stack((middle.nextafter(torch.tensor(low)), middle, middle.nextafter(torch.tensor(high))))
        even = code + code % 2
        assert encode(around, "fp8")[0].tolist() == [code, even, code + 1]
        assert encode(-around, "fp8")[0].tolist() == [code | 128, even | 128, code + 1 | 128]


def test_fp8_ends_at_448():
    data, _ = encode(torch.tensor([448.0, 449.0, 464.0, 480.0, 1e30, -1e30]), "fp8")
    assert data.tolist() == [0x7E] * 5 + [0xFE]


def test_halves_of_int8_go_away_from_zero():
    """Take 127 as the largest value: the scale is 1, so a value is equal to its code before rounding."""
    values = [127.0, 0.5, 1.5, 2.5, 3.5, 125.5, 126.5, 0.49999997, 1.4999999, 2.4999998, 126.49999, 0.25]
    values += [-x for x in values]
    data, scale = encode(torch.tensor(values), "int8_per_token_head")
    assert float(scale) == 1.0
    assert data.view(torch.int8).tolist() == [half_away(torch.tensor(x).item()) for x in values]


@pytest.mark.parametrize("head_size", [1, 2, 3, 6, 12, 64, 80, 96, 112, 128, 160, 256])
def test_runs_are_the_largest_power_of_two_that_divides(head_size):
    assert rotation_run(head_size) == max(2**n for n in range(9) if head_size % 2**n == 0)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_rotation_is_signs_and_then_the_matrix_on_each_run(head_size):
    """Use integers, because all sums of them are exact."""
    x = torch.randint(-50, 50, (20, 2, head_size), generator=torch.Generator().manual_seed(1)).double()
    run = rotation_run(head_size)
    want = ((x.unflatten(-1, (-1, run)) * rotation_signs(run)) @ sylvester(run)).flatten(-2)
    assert torch.equal(rotate(x.float()).double(), want)
    assert torch.equal(unrotate(want.float()).double(), x)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_unrotate_brings_back(head_size):
    x = cells(head_size)
    assert torch.allclose(unrotate(rotate(x)), x, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotated_values_are_rounded_to_the_dtype_given(dtype):
    x = cells(64, dtype=dtype)
    assert rotate(x).dtype == dtype
    assert torch.equal(rotate(x), rotate(x.float()).to(dtype))


def test_signs_are_fixed_and_leave_the_global_generator_alone():
    first = rotation_signs(64).tolist()
    assert set(first) == {1.0, -1.0}
    rotation_signs.cache_clear()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert rotation_signs(64).tolist() == first
    assert torch.equal(torch.get_rng_state(), state)
    drawn = torch.bernoulli(torch.full((64,), 0.5), generator=torch.Generator().manual_seed(0x9E3779B9))
    assert first == (2 * drawn - 1).tolist()
    assert rotation_signs(16).shape == (16,)


def test_zero_point_lies_in_the_lowest_four_bits():
    """Store the values -5 to 10 times 16: the scale is 16, the zero point is 5, and the codes are 0 to 15 in order."""
    stored = torch.arange(-5.0, 11.0) * 16
    x = unrotate(stored)
    assert torch.equal(rotate(x), stored)
    data, word = encode(x, "int4_per_token_head")
    assert data.tolist() == [2 * j | (2 * j + 1) << 4 for j in range(8)]
    assert bits(float(word)) == bits(16.0) | 5
    want = [(q - 5) * float(word) for q in range(16)]
    assert decode(data, word, "int4_per_token_head").tolist() == pytest.approx(want, rel=1e-7)


@pytest.mark.parametrize("head_size", HEAD_SIZES[2:])
def test_word_of_int4_is_the_scale_but_for_its_zero_point(head_size):
    x = cells(head_size)
    stored = rotate(x)
    low, high = stored.amin(-1), stored.amax(-1)
    _, words = encode(x, "int4_per_token_head")
    seen = set()
    for word, least, most in zip(*(t.ravel() for t in (words, low, high)), strict=True):
        scale = (most - least) / 15
        zero_point = min(max(half_away((-least / scale).item()), 0), 15)
        assert bits(word.item()) == bits(scale.item()) & ~15 | zero_point
        seen.add(zero_point)
    assert len(seen) >= 3


@pytest.mark.parametrize(("sign", "zero_point", "code"), [(1.0, 0, 15), (-1.0, 15, 0)])
def test_zero_point_is_clamped_when_zero_lies_outside(sign, zero_point, code):
    """Store values from 15 to 30 times the scale. The largest zero point is 15, so all codes are at one end."""
    x = unrotate(sign * torch.arange(15.0, 31.0) * 16)
    data, word = encode(x, "int4_per_token_head")
    assert bits(float(word)) & 15 == zero_point
    assert data.tolist() == [code | code << 4] * 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", SCALED)
def test_a_cell_that_is_not_finite_is_poisoned_alone(mode, bad):
    x = cells(64)[:3, 0]
    clean, words = encode(x, mode)
    x[1, 7] = bad
    data, word = encode(x, mode)
    assert word.isnan().tolist() == [False, True, False]
    assert data[1].tolist() == [0] * data.shape[-1]
    assert torch.equal(data[::2], clean[::2]) and torch.equal(word[::2], words[::2])
    assert bool(decode(data, word, mode)[1].isnan().all())
    assert bits(float("nan")) == 0x7FC00000 == int(word[1].view(torch.int32))


def test_a_span_beyond_float32_poisons_too():
    """Encode finite values whose rotation is infinite, because its sums overflow."""
    data, word = encode(torch.full((1, 64), 3e38), "int4_per_token_head")
    assert bool(word.isnan()) and not data.any()


def test_modes_without_scales_keep_nan_where_it_is():
    x = torch.tensor([1.0, math.nan, math.inf, -math.inf, -math.nan])
    data, _ = encode(x, "fp8")
    assert (data & 127).tolist() == [0x38, 0x7F, 0x7F, 0x7F, 0x7F]
    data, _ = encode(x, "bfloat16")
    assert data.view(torch.int16).tolist() == [0x3F80, 0x7FC0, 0x7F80, 0xFF80 - 0x10000, 0x7FC0]


@pytest.mark.parametrize("mode", SCALED)
def test_zeros_get_the_smallest_scale(mode):
    data, word = encode(torch.zeros(2, 64), mode)
    assert not data.any()
    smallest = bits(SMALLEST_SCALE) & ~15 if mode == "int4_per_token_head" else bits(SMALLEST_SCALE)
    assert word.view(torch.int32).tolist() == [smallest] * 2
    assert not decode(data, word, mode).any()


@pytest.mark.parametrize("mode", SCALED)
def test_a_cell_does_not_depend_on_its_neighbours(mode):
    x = cells(64)
    whole, words = encode(x, mode)
    for index in [(0, 0), (7, 2), (39, 1)]:
        data, word = encode(x[index], mode)
        assert torch.equal(data, whole[index]) and float(word) == float(words[index])


@pytest.mark.parametrize("function", [lambda mode: encode(torch.zeros(4), mode), lambda mode: decode(None, None, mode)])
def test_an_unknown_mode_gets_a_suggestion(function):
    with pytest.raises(ValueError, match="kv_cache_dtype 'int4' does not exist.*did you mean 'int4_per_token_head'"):
        function("int4")


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_can_be_given_as_a_record(mode):
    x = cells()
    (data, scale), (by_name, scale_by_name) = encode(x, MODES[mode]), encode(x, mode)
    assert torch.equal(data, by_name) and (scale is None or torch.equal(scale, scale_by_name))
    assert torch.equal(decode(data, scale, MODES[mode]), decode(data, scale, mode))


def test_a_code_without_a_formula_is_refused():
    """If a new mode has no formula for its code, it must not get the formula of another mode."""
    for mode in (Mode("int8", "int8"), Mode("bf16_per_token_head", "bfloat16", "float32")):
        with pytest.raises(ValueError, match=f"mode {mode.name} stores {mode.code} codes with"):
            encode(cells(), mode)


@pytest.mark.parametrize("mode", ["int8_per_token_head", "fp8_per_token_head"])
def test_a_scale_may_be_narrower_than_float32(mode):
    """Codes are made with the scale that is stored, so a float16 scale hardly costs accuracy."""
    narrow = Mode("narrow", MODES[mode].code, "float16")
    x = cells()
    data, scale = encode(x, narrow)
    assert scale.dtype == torch.float16 and data.shape == x.shape
    error, usual = ((decode(*encode(x, one), one) - x).abs().mean() for one in (narrow, MODES[mode]))
    assert error < usual * 1.05


@pytest.mark.parametrize("mode", SCALED)
def test_missing_scales_are_asked_for(mode):
    data, _ = encode(cells(), mode)
    with pytest.raises(ValueError, match=f"{mode} has one scale per cell, but scale is None"):
        decode(data, None, mode)


def test_integers_are_not_cells():
    with pytest.raises(ValueError, match="x has dtype torch.int64, but cells are made from floating-point numbers"):
        encode(torch.arange(8), "fp8")
