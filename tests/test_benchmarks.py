"""Scripts that measure transfer engines: what they ask for, what was recorded, and that they run where they can."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def recorded(name: str) -> dict:
    return json.loads((ROOT / "notebooks" / f"recorded_{name}.json").read_text())


def test_descriptors_name_the_bytes_of_one_block_and_no_other():
    nixl_blocks = script("nixl_blocks")
    for one in nixl_blocks.arrangements():
        named = np.zeros(one.nbytes, bool)
        for start, length, _ in one.descriptors(0, nixl_blocks.TARGET):
            assert not named[start : start + length].any()
            named[start : start + length] = True
        assert one.block_of(named, nixl_blocks.TARGET).all()
        assert named.sum() == one.num_layers * one.page_bytes


def test_a_block_that_is_wrong_or_spills_is_refused():
    nixl_blocks = script("nixl_blocks")
    one = nixl_blocks.arrangements()[2]
    cache = np.zeros(one.nbytes, np.uint8)
    source = one.block_of(nixl_blocks.content(2, one.nbytes), nixl_blocks.SOURCE)
    one.block_of(cache, nixl_blocks.TARGET)[...] = source
    nixl_blocks.check(one, 2, cache)
    cache[0] = 1
    with pytest.raises(RuntimeError, match="outside the block"):
        nixl_blocks.check(one, 2, cache)
    with pytest.raises(RuntimeError, match="did not arrive"):
        nixl_blocks.check(one, 2, np.zeros_like(cache))


def test_what_was_recorded_is_what_the_script_measures():
    nixl_blocks, found = script("nixl_blocks"), recorded("nixl")
    told = [(row["layers"], row["page_bytes"], row["layout"], row["asked"]) for row in found["rows"]]
    assert told == [(a.num_layers, a.page_bytes, a.name, a.runs * a.parts) for a in nixl_blocks.arrangements()]
    for name in ("nixl", "mooncake"):
        assert {"machine", "date", "versions"} <= set(recorded(name))


def test_a_readers_pieces_cover_its_buffers():
    mooncake_store = script("mooncake_store")
    buffers = [np.zeros(mooncake_store.PAGE, np.uint8) for _ in range(mooncake_store.NUM_LAYERS)]
    for as_laid_out in (True, False):
        places, lengths = mooncake_store.pieces(buffers, as_laid_out)
        assert len(set(places)) == len(lengths) and sum(lengths) == sum(buffer.nbytes for buffer in buffers)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), [("nixl", "nixl_blocks"), ("mooncake", "mooncake_store")])
def test_the_script_runs_where_its_engine_is_installed(module, name):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / f"{name}.py"], capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    assert set(recorded(module)) - set(json.loads(done.stdout)) == {"machine", "date", "script"}
