"""Test the benchmark of the kernels with small sizes: its byte counts, the work that it times, and its records."""

import json
import sys

import pytest
import torch

from kvviz.cache.modes import MODES
from kvviz.kernels import write
from kvviz.show.figures.roofline import roofline
from tests.test_benchmarks import ROOT, recorded, script


@pytest.fixture
def kernels(monkeypatch):
    """Load the benchmark with small sizes, and with a clock that calls everything once and returns 2 microseconds."""
    module = script("kernels")

    def once(calls):
        for call in calls:
            call()
        return 2.0

    monkeypatch.setattr(module, "microseconds", once)
    monkeypatch.setattr(module, "timed", lambda call: once([call]))
    small = {"NUM_SEQS": 2, "CONTEXT": 48, "NUM_QUERY_HEADS": 4, "NUM_HEADS": 2, "HEAD_SIZE": 64, "NUM_CELLS": 64}
    for name, value in (small | {"LAUNCHES": (2, 2), "TRANSFERS": 1, "READ_BYTES": 1 << 16}).items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize("layout", ["per-layer", "cross-layer"])
def test_rows_of_the_kernels_count_the_useful_bytes(kernels, layout):
    mode = "int8_per_token_head"
    row = kernels.write_row(mode, layout, (32, 2, 64))
    assert row["bytes"] == 2 * 32 * 2 * (128 + 68) + 8 * 32
    assert [kernels.write_row(mode, layout, (32, 2, 64), step)["bytes"] for step in kernels.STEPS] == [row["bytes"]] * 5
    row, *others = kernels.decode_rows(mode, layout, (1, 3))
    assert row["bytes"] == 2 * 48 * 2 * 2 * 68
    assert [(other["splits"], other["bytes"]) for other in others] == [(1, row["bytes"]), (3, row["bytes"])]
    (row,) = kernels.decode_rows(mode, layout, (), (1, 32, 6, 3, 32))
    assert row["kernel"] == "decode shapes" and row["bytes"] == 32 * 3 * 2 * 36
    assert kernels.beside_row(2, 16)["bytes"] == 2 * 2 * 16 * 64 * (2 * 4 + 2 * 2)
    row = kernels.prefill_row(mode, layout, 2, 16)
    assert row["bytes"] == 2 * 16 * (2 * 2 * 68 + 4 * 64 * 6)
    assert row["flop"] == 4 * 2 * 4 * 64 * (16 * 17 // 2)
    rows = kernels.offload_rows(layout)
    assert {(row["kernel"], row["gathered"]) for row in rows} == {
        (way, gathered) for way in ("to host", "from host") for gathered in (True, False)
    }
    assert {row["bytes"] for row in rows} == {32 * 28 * 16 * 8 * 2 * 132}


@pytest.mark.parametrize("order", ["in order", "gathered"])
def test_cells_are_read_whole_with_their_scales(kernels, order):
    for data, stride, inline in kernels.CELLS:
        assert stride >= data + 4 * inline
        assert kernels.cell_row(data, stride, inline, order)["bytes"] == 64 * (data + 4)


def test_the_timed_transfers_move_the_blocks(kernels, monkeypatch):
    """Blocks that go to the host and back into a cleared cache have their old bytes."""
    kept, calls = [], []
    allocate = kernels.allocate
    monkeypatch.setattr(kernels, "allocate", lambda *given: kept.append(allocate(*given)) or kept[-1])
    monkeypatch.setattr(kernels, "timed", lambda call: calls.append(call) or 2.0)
    kernels.offload_rows("per-layer")
    before = [storage.clone() for storage in kept[0].storages]
    for out, back in (calls[:2], calls[2:]):  # gathered, then piece by piece
        out()
        for storage in kept[0].storages:
            storage.zero_()
        back()
        there = [now == was for now, was in zip(kept[0].storages, before, strict=True)]
        rows = torch.stack(there).view(28, 128, -1).all(-1)
        assert int(rows.all(0).sum()) == 32
        for storage, was in zip(kept[0].storages, before, strict=True):
            storage.copy_(was)


def test_recorded_kernels_come_from_the_script():
    kernels, found = script("kernels"), recorded("kernels")
    limits, rows = found["ceilings"], found["rows"]
    assert found["script"] == "benchmarks/kernels.py" and found["versions"].keys() == {"torch", "triton"}
    for row in rows:
        assert row["GB/s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        limit = "read" if row["kernel"].startswith(("decode", "read")) else row["kernel"]
        assert row["share"] == pytest.approx(row["GB/s"] / limits.get(limit, limits["copy"]))
    writes = {(row["mode"], row["layout"], row["T"], row["H"], row["D"]) for row in rows if row["kernel"] == "write"}
    modes = {mode for mode, *_ in writes}  # a mode that is newer than the record need not be in it
    assert modes <= MODES.keys() and len(modes) >= 5
    assert writes == {(mode, name, *size) for mode in modes for name in kernels.LAYOUTS for size in kernels.WRITES}
    assert {row["step"] for row in rows if row["kernel"] == "write step"} == set(kernels.STEPS)
    assert {row["kernel"] for row in rows} == {
        "write", "write step", "read cells", "decode attention", "decode splits", "decode shapes", "prefill",
        "prefill beside", "to host", "from host",
    }  # fmt: skip
    shapes = {(row["S"], row["T"], row["Hq"], row["H"], row["D"]) for row in rows if row["kernel"] == "decode shapes"}
    assert shapes == set(kernels.SHAPES)
    assert len(kernels.table(found).splitlines()) == len(rows) + 1
    words = roofline(found).alt_text
    assert f"{limits['copy']:,.0f} GB/s" in words and found["machine"] in words


def test_a_roofline_is_labelled_in_plain_numbers():
    """Sheets do not render mathematics, so a label such as a power of ten would show its source text."""
    (ax,) = roofline(recorded("kernels")).axes
    labels = [label.get_text() for axis in (ax.xaxis, ax.yaxis) for label in axis.get_ticklabels()]
    assert {"1", "100", "1,000"} <= set(labels) and not any("$" in label for label in labels)


def test_without_a_gpu_the_kernels_are_not_measured(kernels, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(sys, "argv", ["kernels.py"])
    assert kernels.main() == 2
    assert "this machine has no NVIDIA GPU" in capsys.readouterr().err


def test_the_page_on_speed_states_what_was_recorded():
    """The table gives time and share of the ceiling, per-layer and cross-layer."""
    found, lines = recorded("kernels"), (ROOT / "docs" / "speed.md").read_text().splitlines()
    start = lines.index("| kernel | per-layer | cross-layer |")
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 :][:9]]
    kernels = {
        "write fp8, H=8 D=128": ("write", "fp8_per_token_head", 65_536, 8, 128),
        "write int8, H=8 D=128": ("write", "int8_per_token_head", 65_536, 8, 128),
        "write fp8, H=2 D=64": ("write", "fp8_per_token_head", 65_536, 2, 64),
        "write int8, H=2 D=64": ("write", "int8_per_token_head", 65_536, 2, 64),
        "write int4, rotated, H=8 D=128": ("write", "int4_per_token_head", 65_536, 8, 128),
        "decode fp8": ("decode attention", "fp8_per_token_head", 8_192, 8, 128),
        "decode int8": ("decode attention", "int8_per_token_head", 8_192, 8, 128),
        "decode int4": ("decode attention", "int4_per_token_head", 8_192, 8, 128),
        "decode bfloat16": ("decode attention", "bfloat16", 8_192, 8, 128),
    }
    assert [row[0] for row in table] == list(kernels)
    for name, *stated in table:
        for layout, cell in zip(("per-layer", "cross-layer"), stated, strict=True):
            (row,) = (
                row for row in found["rows"]
                if (row["kernel"], row.get("mode"), row.get("T"), row.get("H"), row.get("D")) == kernels[name]
                and row["layout"] == layout and row.get("order", "random") == "random"
            )  # fmt: skip
            assert cell == f"{row['us']:.0f} µs, {row['share']:.0%}"
    limits = found["ceilings"]
    head = f"On one {found['machine']}, {found['date']}, torch {found['versions']['torch']}, Triton "
    assert any(head in line and f"{limits['copy']:,.0f} GB/s" in line for line in lines)


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.is_per_token_head])
def test_notebook_10_describes_the_launches_that_a_gpu_gets(kernels, mode, monkeypatch):
    """The notebook computes the shapes of the five steps itself. They must equal the shapes of the launcher."""
    monkeypatch.setattr(write, "INTERPRETED", False)
    cells = json.loads((ROOT / "notebooks" / "10_how_fast_can_a_scale_be_written.ipynb").read_text())["cells"]
    told = {"T": 65_536, "H": 8, "D": 128}
    exec("".join(next(cell["source"] for cell in cells if cell["id"] == "10-020")), told)
    key = torch.empty(65_536, 8, 128, dtype=torch.bfloat16, device="meta")
    for program in kernels.STEPS.values():
        assert told["shape_on_gpu"](program, mode) == write._launch_shape(program, key, MODES[mode])


def test_notebook_10_takes_the_steps_that_were_measured(kernels):
    cells = json.loads((ROOT / "notebooks" / "10_how_fast_can_a_scale_be_written.ipynb").read_text())["cells"]
    told = {}
    exec("".join(next(cell["source"] for cell in cells if cell["id"] == "10-016")).split("SCALED")[0], told)
    assert told["STEPS"] == kernels.STEPS
