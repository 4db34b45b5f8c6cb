"""Test the device functions bit by bit against torch, through tiny kernels; test that all kernels compile for GPUs."""

import dataclasses
import importlib.util
import json
import math
import traceback
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from kvviz.cache import modes
from kvviz.cache.codes import rotation_signs
from kvviz.cache.modes import MODES
from kvviz.kernels import codec, rotation
from kvviz.kernels.codec import tl, triton
from kvviz.kernels.rotation import sign_bits
from kvviz.kernels.runtime import device
from tests.processes import run_python

DEVICE = device()
BLOCK = 4096
CAPABILITIES = (75, 80, 90, 100)


@triton.jit
def _to_e4m3(x_ptr, out_ptr, count, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0)
    tl.store(out_ptr + place, codec.to_e4m3_bits(x), mask=place < count)


@triton.jit
def _from_e4m3(code_ptr, out_ptr, count, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    code = tl.load(code_ptr + place, mask=place < count, other=0)
    tl.store(out_ptr + place, codec.from_e4m3_bits(code), mask=place < count)


@triton.jit
def _to_bfloat16(x_ptr, out_ptr, count, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0)
    tl.store(out_ptr + place, codec.to_bfloat16_bits(x), mask=place < count)


@triton.jit
def _round(x_ptr, out_ptr, count, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0)
    tl.store(out_ptr + place, codec.round_half_away(x), mask=place < count)


@triton.jit
def _finite(x_ptr, out_ptr, count, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0)
    tl.store(out_ptr + place, codec.finite(x).to(tl.uint8), mask=place < count)


@triton.jit
def _transform(x_ptr, out_ptr, REP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, LOG2_LENGTH: tl.constexpr):
    column = tl.arange(0, REP)[:, None, None] * WIDE + tl.arange(0, WIDE)[None, None, :]
    place = tl.arange(0, ROWS)[None, :, None] * REP * WIDE + column
    tl.store(out_ptr + place, rotation.hadamard(tl.load(x_ptr + place), REP, ROWS, WIDE, LOG2_LENGTH))


@triton.jit
def _signs(out_ptr, COLUMNS: tl.constexpr, SIGNS: tl.constexpr, RUN: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    tl.store(out_ptr + column, rotation.rotation_sign(column, SIGNS, RUN))


def through(kernel, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Apply a kernel of one device function to every element of ``x``; return the result on the CPU."""
    x = x.to(DEVICE)
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), SIZE=BLOCK, enable_fp_fusion=False)
    return out.cpu()


def patterns(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return all 65,536 values of a 16-bit dtype, as float32."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def random_floats(count: int) -> torch.Tensor:
    """Return float32 numbers of any sign and exponent, NaN and infinity included."""
    drawn = torch.randint(-(1 << 31), 1 << 31, (count,), generator=torch.Generator().manual_seed(0))
    return drawn.to(torch.int32).view(torch.float32)


def around(x: torch.Tensor) -> torch.Tensor:
    """Return each value, its two neighbouring floats, and the negatives of all three."""
    up, down = (x.nextafter(torch.full_like(x, end)) for end in (math.inf, -math.inf))
    some = torch.cat((down, x, up))
    return torch.cat((some, -some))


def e4m3_values() -> torch.Tensor:
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def torch_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def wrong(ours: torch.Tensor, theirs: torch.Tensor, x: torch.Tensor) -> list[float]:
    return x[ours != theirs][:5].tolist()


def test_e4m3_bits_of_every_bfloat16_and_float16():
    for dtype in (torch.bfloat16, torch.float16):
        x = patterns(dtype)
        x = x[~x.isnan()]
        assert len(x) > 63_000
        assert wrong(through(_to_e4m3, x, torch.uint8), torch_e4m3(x), x) == []


def test_e4m3_bits_at_every_code_and_every_midpoint():
    values = e4m3_values()
    x = around(torch.cat((values, (values[1:] + values[:-1]) / 2)))
    assert wrong(through(_to_e4m3, x, torch.uint8), torch_e4m3(x), x) == []


def test_e4m3_bits_of_a_dense_range():
    """The range has all subnormal codes, the first normal codes, and numbers beyond the largest code."""
    dense = torch.cat((torch.linspace(-0.04, 0.04, 100_001), torch.linspace(-500, 500, 100_001)))
    tiny = torch.tensor([0.0, -0.0, 1e-45, 1e-38, 2.0**-10, 2.0**-9, 2.0**-6, math.inf, -math.inf])
    x = torch.cat((dense, around(tiny[:7]), tiny))
    assert wrong(through(_to_e4m3, x, torch.uint8), torch_e4m3(x), x) == []


def test_all_256_codes_back():
    codes = torch.arange(256, dtype=torch.uint8)
    ours, theirs = through(_from_e4m3, codes, torch.float32), codes.view(torch.float8_e4m3fn).float()
    assert ours.isnan().nonzero().ravel().tolist() == [127, 255]
    real = ~theirs.isnan()
    assert torch.equal(ours[real].view(torch.int32), theirs[real].view(torch.int32))


def test_bfloat16_bits():
    exact = patterns()
    halves = (exact.view(torch.int32) + 0x8000).view(torch.float32)
    x = torch.cat((exact, halves[halves.isfinite()], around(halves[halves.isfinite()]), random_floats(200_000)))
    ours, theirs = through(_to_bfloat16, x, torch.int16), x.to(torch.bfloat16).view(torch.int16)
    real = ~x.isnan()
    assert wrong(ours[real], theirs[real], x[real]) == []
    assert int((~real).sum()) > 250 and set(ours[~real].tolist()) == {0x7FC0}


def half_away(x: float) -> float:
    return math.copysign(math.floor(abs(Fraction(x)) + Fraction(1, 2)), x)


def test_halves_go_away_from_zero():
    halves = around(torch.arange(0.0, 300.0, 0.5))
    edges = [0.49999997, 0.5, 0.50000006, 2.0**22 + 0.5, 2.0**23 - 0.5, 2.0**23 + 1, 2.0**24, 8388609.0, 1e30, 3.4e38]
    drawn = random_floats(3000)
    x = torch.cat((halves, torch.tensor(edges), -torch.tensor(edges), drawn[drawn.isfinite()]))
    ours = through(_round, x, torch.float32)
    assert wrong(ours, torch.tensor([half_away(value) for value in x.tolist()]), x) == []


def test_rounding_an_infinity_or_nan_invents_no_number():
    ours = through(_finite, torch.tensor([math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 0.0, 1e-45]), torch.uint8)
    assert ours.tolist() == [0, 0, 0, 1, 1, 1, 1]
    x = torch.cat((patterns(), random_floats(50_000)))
    assert torch.equal(through(_finite, x, torch.uint8).bool(), x.isfinite())


def sylvester(run: int) -> torch.Tensor:
    signs = [[(-1.0) ** (row & column).bit_count() for column in range(run)] for row in range(run)]
    return torch.tensor(signs, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rep", "rows", "wide", "log2_length"),
    [(1, 1, 2, 1), (1, 2, 16, 4), (8, 4, 8, 6), (4, 2, 32, 4), (16, 32, 8, 7), (1, 8, 32, 0), (4, 1, 64, 8)],
)
def test_hadamard_is_the_matrix_on_each_run(rep, rows, wide, log2_length):
    """Sums of integers are exact in float32, so the results must be equal."""
    drawn = torch.randint(-50, 50, (rows, rep * wide), generator=torch.Generator().manual_seed(rows)).float()
    x = drawn.to(DEVICE)
    out = torch.empty_like(x)
    _transform[(1,)](x, out, REP=rep, ROWS=rows, WIDE=wide, LOG2_LENGTH=log2_length, num_warps=1)
    want = (drawn.double().unflatten(1, (-1, 1 << log2_length)) @ sylvester(1 << log2_length)).flatten(1)
    assert torch.equal(out.cpu().double(), want)


@pytest.mark.parametrize(("columns", "run"), [(2, 2), (64, 16), (128, 128), (256, 32), (256, 256)])
def test_signs_as_bits_are_the_rotations_signs(columns, run):
    out = torch.empty(columns, device=DEVICE)
    _signs[(1,)](out, COLUMNS=columns, SIGNS=sign_bits(run), RUN=run)
    assert torch.equal(out.cpu(), rotation_signs(run).repeat(columns // run))


def test_a_mode_with_a_code_that_the_kernels_lack_is_refused(monkeypatch):
    fp3 = dataclasses.replace(MODES["int8_per_token_head"], name="fp3_per_token_head")
    object.__setattr__(fp3, "code", "fp3")
    monkeypatch.setitem(modes.MODES, fp3.name, fp3)
    supported = ", ".join(codec.SUPPORTED_CODES)
    words = f"mode fp3_per_token_head has codes of kind 'fp3', but the kernels support only {supported}"
    with pytest.raises(ValueError, match=words):
        codec.kernel_mode("fp3_per_token_head")
    with pytest.raises(ValueError, match="fp3_per_token_heads.*did you mean 'fp3_per_token_head'"):
        codec.kernel_mode("fp3_per_token_heads")


def test_a_zero_point_without_int4_codes_is_refused(monkeypatch):
    odd = dataclasses.replace(MODES["int8_per_token_head"], has_zero_point=True)
    monkeypatch.setitem(modes.MODES, odd.name, odd)
    with pytest.raises(ValueError, match="has codes 'int8' and has_zero_point=True: .* has_zero_point=False"):
        codec.kernel_mode(odd.name)


@triton.jit
def _decode(word_ptr, out_ptr, CODE: tl.constexpr):
    place = tl.arange(0, 16)
    tl.store(out_ptr + place, codec.word_values(tl.load(word_ptr + place), CODE, False)[0])


@triton.jit
def _encode(x_ptr, out_ptr, CODE: tl.constexpr, SCALED: tl.constexpr):
    place = tl.arange(0, 16)
    x = tl.load(x_ptr + place)
    if SCALED:
        one, good = tl.full((1,), 1.0, tl.float32), tl.full((1,), 1, tl.int1)
        tl.store(out_ptr + place, codec.codes_of(tl.reshape(x, (1, 1, 16)), one, one, good, 1, 1, 16, CODE, False))
    else:
        tl.store(out_ptr + place, codec.codes_without_scale(x, CODE, False))


@pytest.mark.parametrize(
    ("function", "launch"),
    [
        ("word_values", lambda out: _decode[(1,)](out.short(), out, CODE="fp3")),
        ("codes_of", lambda out: _encode[(1,)](out, out.byte(), CODE="fp3", SCALED=True)),
        ("codes_without_scale", lambda out: _encode[(1,)](out, out.byte(), CODE="int8", SCALED=False)),
    ],
)
def test_a_code_without_a_branch_is_an_error_and_not_fp8(function, launch):
    """In the interpreter and in a compiled kernel, a chain of branches on CODE ends in an assertion."""
    with pytest.raises(Exception) as caught:  # of another type in the interpreter and in the compiler
        launch(torch.zeros(16, device=DEVICE))
    assert f"{function} has no branch for this CODE" in "".join(traceback.format_exception(caught.value))


COMPILE = """
import json, sys, traceback
import torch
torch.cuda.is_available = lambda: True
torch.cuda.mem_get_info = lambda: (1 << 36, 1 << 37)
from kvviz.cache.modes import MODES
from kvviz.kernels import attention, attention_tiles, gather, write
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compile_one(kernel, types, constants, warps, capability):
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types, strict=True)) | {name: "constexpr" for name in constants}
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    options = {"enable_fp_fusion": False, "num_warps": warps}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

made = []
for mode, capability in json.loads(sys.argv[1]):
    record = MODES[mode]
    scaled = record.is_per_token_head
    known = {"CODE": record.code, "SCALED": scaled, "ROTATED": record.rotated, "ZERO_POINT": record.has_zero_point}
    known |= {"PER_BYTE": record.codes_per_byte, "PER_WORD": 16 // record.code_bits, "PTX": capability >= 89}
    known |= {"LOG2_LENGTH": 6, "SIGNS": 5}
    cell = "*i16" if record.code == "bfloat16" else "*u8"
    scale = "*fp32" if scaled else cell
    writes = ["*bf16", "*bf16", cell, cell, scale, scale, "*i64"] + ["i32"] * 9
    sizes = {"HEAD_SIZE": 64, "NUM_HEADS": 2, "BLOCK_SIZE": 16, "TOKENS": 8, "HEADS": 2, "ROWS": 32, "REP": 8}
    sizes |= {"WIDE": 8, "IN_BYTES": 16, "CACHE_BYTES": 4}
    reads = ["*fp32", cell, cell, scale, scale, "*fp32", "*i32", "*i32", "*i32"] + ["i32"] * 3 + ["fp32"] + ["i32"] * 9
    tiles = {"GROUP": 3, "QUERIES": 5, "ROWS": 16, "HEADS": 1, "TILE": 32, "COLUMNS": 64}
    decodes = ["*bf16", "*i16", "*i16"] + ["*fp32"] * 5 + ["*i32"] * 3 + ["fp32"] + ["i32"] * 10
    one = {"HEAD_SIZE": 64, "BLOCK_SIZE": 16, "NUM_HEADS": 2, "GROUP": 3, "QUERIES": 2, "ROWS": 8}
    one |= {"CACHE_TOKEN": 136, "SCALE_TOKEN": 68, "TILE": 32, "COLUMNS": 64, "K_BYTES": 4, "V_BYTES": 4}
    merges = ["*fp32"] * 4 + ["*i32"] + ["i32"] * 4
    heads = {"NUM_HEADS": 6, "HEAD_SIZE": 64, "SPLITS": 16, "COLUMNS": 64}
    moves = ["*i64", "*i64", "*i64", "*i64", "i32", "i32"]
    pieces = {"IN_BLOCK": 3, "PIECES": 1, "WORDS": 512, "WORD_BYTES": 8, "BYTES": 16, "TO_STAGE": scaled}
    kernels = (
        (write._write_kernel, writes, sizes, 1),
        (attention._attention_kernel, reads, tiles, 4),
        (attention_tiles._tile_kernel, decodes, one, 1),
        (attention_tiles._merge_kernel, merges, heads, 4),
        (gather._move_kernel, moves, pieces, 4),
    )
    for kernel, types, constants, warps in kernels:
        constants |= {name: known[name] for name in kernel.arg_names if name in known}
        done = compile_one(kernel, types, constants, warps, capability)
        named = done.asm["ptx"].count(f".target sm_{capability}")
        exchanged = done.asm["ptx"].count("shfl.")
        made.append([kernel.__name__, mode, capability, len(done.asm["cubin"]), named, exchanged])
try:
    compile_one(write._write_kernel, writes, sizes | {"CODE": "fp3", "SCALED": True}, 1, 90)
except Exception:
    traceback.print_exc()
print(json.dumps(made))
"""


def ptxas() -> Path | None:
    """Return the path of the assembler in triton's package, or None."""
    package = Path(importlib.util.find_spec("triton").origin).parent
    found = package / "backends" / "nvidia" / "bin" / "ptxas"
    return found if found.exists() else None


@pytest.mark.slow
@pytest.mark.skipif(ptxas() is None, reason="the triton package has no ptxas")
def test_kernels_compile_for_every_gpu(tmp_path):
    """A process of its own compiles every kernel in every mode, from Turing to Blackwell. It needs no GPU."""
    wanted = [[mode, capability] for mode in MODES for capability in CAPABILITIES]
    done = run_python(COMPILE, json.dumps(wanted), timeout=570, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "has no branch for this CODE" in done.stderr
    made = json.loads(done.stdout)
    kernels = ("_write_kernel", "_attention_kernel", "_tile_kernel", "_merge_kernel", "_move_kernel")
    assert [row[:3] for row in made] == [[kernel, *pair] for pair in wanted for kernel in kernels]
    assert all(cubin > 1000 and named for *_, cubin, named, _ in made)
    rotated = [row for row in made if row[:2] == ["_write_kernel", "int4_per_token_head"]]
    assert [row[-1] for row in rotated] == [0] * len(CAPABILITIES), "the threads exchange elements of a rotated row"
