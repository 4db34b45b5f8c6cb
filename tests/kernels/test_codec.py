"""The device functions through tiny kernels, bit by bit against torch; and that all kernels compile for four GPUs."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from kvviz.cache.codes import rotation_signs
from kvviz.cache.modes import MODES
from kvviz.kernels import codec
from kvviz.kernels.codec import tl, triton
from kvviz.kernels.runtime import device
from kvviz.kernels.write import sign_bits

DEVICE = device()
ROOT = Path(__file__).parents[2]
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
def _transform(x_ptr, out_ptr, REP: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, LOG2_RUN: tl.constexpr):
    column = tl.arange(0, REP)[:, None, None] * WIDE + tl.arange(0, WIDE)[None, None, :]
    place = tl.arange(0, ROWS)[None, :, None] * REP * WIDE + column
    tl.store(out_ptr + place, codec.hadamard(tl.load(x_ptr + place), REP, ROWS, WIDE, LOG2_RUN))


@triton.jit
def _signs(out_ptr, COLUMNS: tl.constexpr, SIGNS: tl.constexpr, RUN: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    tl.store(out_ptr + column, codec.rotation_sign(column, SIGNS, RUN))


def through(kernel, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Every element of ``x`` through a kernel of one device function; the result on the CPU."""
    x = x.to(DEVICE)
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), SIZE=BLOCK, enable_fp_fusion=False)
    return out.cpu()


def patterns(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """All 65,536 values of a 16-bit dtype, in float32."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def random_floats(count: int) -> torch.Tensor:
    """float32 of any sign and exponent, NaN and infinity among them."""
    drawn = torch.randint(-(1 << 31), 1 << 31, (count,), generator=torch.Generator().manual_seed(0))
    return drawn.to(torch.int32).view(torch.float32)


def around(x: torch.Tensor) -> torch.Tensor:
    """Each value, the two floats beside it, and all of these negated."""
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
    """All the subnormal codes, the seam to the normal ones, and the clamp."""
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
    ("rep", "rows", "wide", "log2_run"),
    [(1, 1, 2, 1), (1, 2, 16, 4), (8, 4, 8, 6), (4, 2, 32, 4), (16, 32, 8, 7), (1, 8, 32, 0), (4, 1, 64, 8)],
)
def test_hadamard_is_the_matrix_on_each_run(rep, rows, wide, log2_run):
    """On integers every sum is exact, so equality is too."""
    drawn = torch.randint(-50, 50, (rows, rep * wide), generator=torch.Generator().manual_seed(rows)).float()
    x = drawn.to(DEVICE)
    out = torch.empty_like(x)
    _transform[(1,)](x, out, REP=rep, ROWS=rows, WIDE=wide, LOG2_RUN=log2_run, num_warps=1)
    want = (drawn.double().unflatten(1, (-1, 1 << log2_run)) @ sylvester(1 << log2_run)).flatten(1)
    assert torch.equal(out.cpu().double(), want)


@pytest.mark.parametrize(("columns", "run"), [(2, 2), (64, 16), (128, 128), (256, 32), (256, 256)])
def test_signs_as_bits_are_the_rotations_signs(columns, run):
    out = torch.empty(columns, device=DEVICE)
    _signs[(1,)](out, COLUMNS=columns, SIGNS=sign_bits(run), RUN=run)
    assert torch.equal(out.cpu(), rotation_signs(run).repeat(columns // run))


COMPILE = """
import json, sys
import torch
torch.cuda.is_available = lambda: True
torch.cuda.mem_get_info = lambda: (1 << 36, 1 << 37)
from kvviz.engine import attention, gather, tensor_cores, write
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
    scaled = mode.endswith("per_token_head")
    cell = "*i16" if mode == "bfloat16" else "*u8"
    scale = "*fp32" if scaled else cell
    writes = ["*bf16", "*bf16", cell, cell, scale, scale, "*i64"] + ["i32"] * 9
    sizes = {"HEAD_SIZE": 64, "NUM_HEADS": 2, "BLOCK_SIZE": 16, "TOKENS": 8, "HEADS": 2, "ROWS": 32, "REP": 8}
    both = {"LOG2_RUN": 6, "SIGNS": 5}
    sizes |= {"WIDE": 8, "IN_BYTES": 16, "CACHE_BYTES": 4, "MODE": mode, "PTX": capability >= 89} | both
    reads = ["*fp32", cell, cell, scale, scale, "*fp32", "*i32", "*i32", "*i32"] + ["i32"] * 3 + ["fp32"] + ["i32"] * 9
    tiles = {"GROUP": 3, "QUERIES": 5, "ROWS": 16, "HEADS": 1, "TILE": 32, "COLUMNS": 64}
    tiles |= {"SCALED": scaled, "MODE": mode}
    decodes = ["*bf16", "*i16", "*i16"] + ["*fp32"] * 5 + ["*i32"] * 3 + ["fp32"] + ["i32"] * 12
    one = {"HEAD_SIZE": 64, "BLOCK_SIZE": 16, "NUM_HEADS": 2, "GROUP": 3, "QUERIES": 2, "ROWS": 8} | both
    one |= {"TILE": 32, "COLUMNS": 64}
    one |= {"PARTS": tensor_cores.PARTS[mode], "K_BYTES": 4, "V_BYTES": 4, "SCALED": scaled}
    one |= {"MODE": mode, "PTX": capability >= 89}
    merges = ["*fp32"] * 4 + ["i32"] * 3
    heads = {"NUM_HEADS": 6, "HEAD_SIZE": 64, "HEADS": 4, "COLUMNS": 64, "ROTATED": mode.startswith("int4")} | both
    moves = ["*i64", "*i64", "*i64", "*i64", "i32", "i32"]
    pieces = {"IN_BLOCK": 3, "PIECES": 1, "WORDS": 512, "WORD_BYTES": 8, "BYTES": 16, "TO_STAGE": scaled}
    kernels = (
        (write._write_kernel, writes, sizes, 1),
        (attention._attention_kernel, reads, tiles, 4),
        (tensor_cores._tile_kernel, decodes, one, 1),
        (tensor_cores._merge_kernel, merges, heads, 4),
        (gather._move_kernel, moves, pieces, 4),
    )
    for kernel, types, constants, warps in kernels:
        done = compile_one(kernel, types, constants, warps, capability)
        named = done.asm["ptx"].count(f".target sm_{capability}")
        exchanged = done.asm["ptx"].count("shfl.")
        made.append([kernel.__name__, mode, capability, len(done.asm["cubin"]), named, exchanged])
print(json.dumps(made))
"""


def ptxas() -> Path | None:
    """The assembler that lies in triton's package, if it does."""
    package = Path(importlib.util.find_spec("triton").origin).parent
    found = package / "backends" / "nvidia" / "bin" / "ptxas"
    return found if found.exists() else None


@pytest.mark.slow
@pytest.mark.skipif(ptxas() is None, reason="this triton brings no ptxas")
def test_kernels_compile_for_every_gpu(tmp_path):
    """No GPU is needed: a process of its own compiles every kernel in every mode, from Turing to Blackwell."""
    wanted = [[mode, capability] for mode in MODES for capability in CAPABILITIES]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILE, json.dumps(wanted)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout)
    kernels = ("_write_kernel", "_attention_kernel", "_tile_kernel", "_merge_kernel", "_move_kernel")
    assert [row[:3] for row in made] == [[kernel, *pair] for pair in wanted for kernel in kernels]
    assert all(cubin > 1000 and named for *_, cubin, named, _ in made)
    rotated = [row for row in made if row[:2] == ["_write_kernel", "int4_per_token_head"]]
    assert [row[-1] for row in rotated] == [0] * len(CAPABILITIES), "a rotated row has left its thread"
