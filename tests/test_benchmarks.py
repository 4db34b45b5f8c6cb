"""Tests of the measuring scripts: what they measure, what was recorded, and that they leave no process behind."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvviz.cache.codes import decode, encode

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
    with pytest.raises(RuntimeError, match="outside the block have changed"):
        nixl_blocks.check(one, 2, cache)
    with pytest.raises(RuntimeError, match="differs from the source"):
        nixl_blocks.check(one, 2, np.zeros_like(cache))


def test_what_was_recorded_is_what_the_script_measures():
    nixl_blocks, found = script("nixl_blocks"), recorded("nixl")
    measured = [(row["layers"], row["page_bytes"], row["layout"], row["asked"]) for row in found["rows"]]
    assert measured == [(a.num_layers, a.page_bytes, a.name, a.ranges * a.parts) for a in nixl_blocks.arrangements()]
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


@pytest.mark.parametrize(("module", "name"), [("nixl", "nixl_blocks"), ("mooncake", "mooncake_store")])
def test_without_its_engine_a_script_says_what_to_install(module, name):
    """Run the script in a process that cannot find the engine, even if the engine is installed."""
    code = f"""if True:
        import importlib.util, runpy, sys
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: None if name == {module!r} else find(name, *more)
        runpy.run_path({str(ROOT / "benchmarks" / f"{name}.py")!r}, run_name="__main__")"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    requirement = script(name).REQUIREMENT
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"{module} is not installed: python -m pip install {requirement}\n"
    assert requirement in (ROOT / "notebooks" / "07_the_fast_path_regained.ipynb").read_text(encoding="utf-8")
    assert re.fullmatch(r"(--no-deps )?\S+==[\d.]+\S*( \S+==[\d.]+)?", requirement)


def killed(pipe) -> None:
    """Die at once, as by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed_when_told(pipe) -> None:
    """Send a message, and die after the answer."""
    pipe.send("here")
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def deaf(pipe) -> None:
    """Send a message, and ignore all answers."""
    pipe.send("here")
    time.sleep(600)


def obedient(pipe) -> None:
    """Send a message, and end after the answer, or when the other process is gone."""
    pipe.send("here")
    pipe.poll(600)


def reading(nixl_blocks, number: int, arrived: bool):
    """Return a reading after its first transfer, or in the middle of it, without an engine."""
    one = nixl_blocks.arrangements()[number]
    made = nixl_blocks.Reading.__new__(nixl_blocks.Reading)
    made.one, made.number, made.arrived, made.cache = one, number, arrived, np.zeros(one.nbytes, np.uint8)
    source = one.block_of(nixl_blocks.content(number, one.nbytes), nixl_blocks.SOURCE)
    one.block_of(made.cache, nixl_blocks.TARGET)[: None if arrived else 1] = source[: None if arrived else 1]
    return made


def gone(pid: int) -> bool:
    """Return True if a process ends within ten seconds. A zombie process has ended."""
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="the scripts need Linux")


@linux
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_process_that_dies_is_noticed_and_arrived_blocks_are_right(when):
    nixl_blocks = script("nixl_blocks")
    pids = []

    def measure(peer, readings):
        pids.append(peer.process.pid)
        assert peer.receive() == "here"
        readings += [reading(nixl_blocks, 8, True), reading(nixl_blocks, 9, True), reading(nixl_blocks, 10, False)]
        peer.pipe.send("die")
        peer.process.join(20)
        if when == "during":
            raise RuntimeError("the engine says: disconnected")
        return ["rows"]

    def dies_before(peer, readings):
        pids.append(peer.process.pid)
        peer.receive()

    start, before = time.monotonic(), when == "before"
    said = rf"the first process \(pid \d+\) died with exit code -9\. {0 if before else 2} of 12 blocks had arrived"
    with pytest.raises(SystemExit, match=f"{said}, and their bytes are right. Run the script again"):
        nixl_blocks.run_with_peer(killed if before else killed_when_told, dies_before if before else measure)
    assert gone(pids[0]) and time.monotonic() - start < 30


@linux
def test_a_transfer_that_never_ends_is_given_up_when_its_other_side_is_dead(monkeypatch):
    class Engine:
        def transfer(self, handle):
            return "PROC"

        check_xfer_state = transfer

    nixl_blocks = script("nixl_blocks")
    monkeypatch.setattr(nixl_blocks, "LONG", 0.1)

    def measure(peer, readings):
        peer.receive()
        peer.pipe.send("die")
        nixl_blocks.transfer(Engine(), None, peer)

    with pytest.raises(SystemExit, match=r"died with exit code -9\. 0 of 12"):
        nixl_blocks.run_with_peer(killed_when_told, measure)


@linux
def test_a_block_that_changed_later_is_reported(monkeypatch):
    nixl_blocks = script("nixl_blocks")
    lost = reading(nixl_blocks, 8, True)
    lost.cache[:] = 0
    with pytest.raises(RuntimeError, match="differs from the source"):
        nixl_blocks.intact([lost])


@linux
def test_other_mistakes_are_passed_on_and_a_deaf_process_is_not_left_behind(monkeypatch):
    nixl_blocks = script("nixl_blocks")
    monkeypatch.setattr(nixl_blocks, "GRACE", 0.2)
    monkeypatch.setattr(nixl_blocks, "LONG", 0.1)
    pids = []

    def measure(peer, readings):
        pids.append(peer.process.pid)
        peer.receive()
        raise RuntimeError("a mistake of this side")

    for work in (deaf, obedient):
        with pytest.raises(RuntimeError, match="a mistake of this side"):
            nixl_blocks.run_with_peer(work, measure)
    monkeypatch.setattr(nixl_blocks, "SECONDS", 0.2)
    with pytest.raises(TimeoutError, match="the first process sent nothing for 0 seconds"):
        nixl_blocks.run_with_peer(
            deaf, lambda peer, readings: (peer.receive(), pids.append(peer.process.pid), peer.receive())
        )
    assert all(gone(pid) for pid in pids)


@linux
def test_the_other_process_ends_when_this_one_is_killed():
    code = f"""if True:
        import sys, time
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "benchmarks")!r}]
        import nixl_blocks
        from tests.test_benchmarks import obedient
        peer = nixl_blocks.Peer(obedient)
        peer.receive()
        print(peer.process.pid, flush=True)
        time.sleep(600)"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        other = int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert gone(other)


@linux
@pytest.mark.parametrize("fetched", [0, 1, 2])
def test_a_master_that_dies_is_noticed(fetched, monkeypatch):
    """After the death, the store answers with an error, or with a number below 0."""
    mooncake_store = script("mooncake_store")
    server = subprocess.Popen(["sleep", "600"])

    def stored(cross_layer, rows):
        rows += [{}] * fetched
        server.kill()
        server.wait()
        if fetched < 2:
            raise RuntimeError("the store answered -900")
        return {}

    monkeypatch.setattr(mooncake_store, "stored", stored)
    monkeypatch.setattr(mooncake_store, "registered", lambda cross_layer: {})
    said = rf"the store's master \(pid {server.pid}\) died with exit code -9\. {fetched} of 2 readers had fetched the "
    with pytest.raises(SystemExit, match=f"{said}block. The buffer from which the block was put is unchanged. Run"):
        mooncake_store.watched(server, np.zeros(8, np.uint8))


def test_a_store_without_an_answer_is_stopped(monkeypatch):
    mooncake_store = script("mooncake_store")

    def run(command, check, timeout):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(mooncake_store.subprocess, "run", run)
    with pytest.raises(SystemExit, match="mooncake_store.py gave no answer for 150 seconds and was stopped"):
        mooncake_store.in_a_namespace()


KILLS = """if True:
    import multiprocessing, os, sys, time
    sys.path.insert(0, {folder!r})
    os.environ.update(UCX_NET_DEVICES="lo", NIXL_LOG_LEVEL="WARN")
    import nixl, nixl_blocks
    real, posts = nixl.nixl_agent.transfer, []
    def transfer(self, handle):
        posts.append(handle)
        if len(posts) == {at}:
            (other,) = multiprocessing.active_children()
            os.kill(other.pid, 9)
            time.sleep({pause})
        return real(self, handle)
    nixl.nixl_agent.transfer = transfer
    nixl_blocks.main()"""


@pytest.mark.slow
@pytest.mark.parametrize(("at", "pause", "arrived"), [(1, 0.5, "0"), (6, 0, "[56]"), (700, 0.5, "12")])
def test_nixls_first_process_is_killed(at, pause, arrived):
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed")
    code = KILLS.format(folder=str(ROOT / "benchmarks"), at=at, pause=pause)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=200, text=True)
    assert done.returncode == 1 and not done.stdout and "Traceback" not in done.stderr, done.stderr
    assert re.search(
        rf"died with exit code -9\. {arrived} of 12 blocks had arrived, and their bytes are right", done.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "fetched"), [("put_from", 0), ("batch_get_into_multi_buffers", 0), ("get_size", 2), ("close", 2)]
)
def test_mooncakes_master_is_killed(call, fetched):
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("mooncake is not installed")
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(ROOT / "benchmarks")!r})
        import mooncake_store
        from mooncake.store import MooncakeDistributedStore as Store
        master, real, started = mooncake_store.master, Store.{call}, []
        def starts():
            started.append(master())
            return started[0]
        def dies(self, *rest):
            started[0].kill()
            return real(self, *rest)
        mooncake_store.master, Store.{call} = starts, dies
        mooncake_store.inside()"""
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", "--net", *root, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=200, text=True, errors="replace")
    assert done.returncode == 1 and "Traceback" not in done.stderr and '"engine"' not in done.stdout, done.stderr
    assert f"died with exit code -9. {fetched} of 2 readers had fetched the block. The buffer" in done.stderr


class TestOpenCase:
    """The watch of ``open_case_inside.py``, without an engine, and the record of ``open_case.py``."""

    @pytest.fixture
    def watched(self):
        """Return a watch, a layer, and the layer's empty cache: 4 blocks of 16 tokens, 2 heads of size 8, int8."""
        layer = SimpleNamespace(
            layer_name="a", kv_sharing_target_layer_name=None, impl=SimpleNamespace(), kv_cache=None
        )
        return script("open_case_inside").Watch(torch, {"a": layer}), layer, torch.zeros(4, 2, 16, 24, dtype=torch.int8)

    def write(self, watch, layer, cache):
        """Write three tokens as an engine should. Return their slots."""
        key, value = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(1))
        slots = torch.tensor([17, 18, 40])
        cells, _ = watch.encoded(key, value, int8=True)
        cache[slots // 16, :, slots % 16] = cells.view(torch.int8)
        return key, value, slots

    def test_expected_cells_are_those_of_the_reference_codes(self, watched):
        watch, layer, cache = watched
        key, value, _ = self.write(watch, layer, cache)
        cells, values = watch.encoded(key, value, int8=True)
        for half, given, stands_for in ((cells[..., :12], key, values[0]), (cells[..., 12:], value, values[1])):
            data, scale = encode(given, "int8_per_token_head")
            assert torch.equal(half[..., :8], data) and torch.equal(
                half[..., 8:].contiguous().view(torch.float32)[..., 0], scale
            )
            assert torch.equal(stands_for, decode(data, scale, "int8_per_token_head"))

    def test_one_changed_byte_is_named(self, watched):
        watch, layer, cache = watched
        key, value, slots = self.write(watch, layer, cache)
        watch.written(layer, key, value, cache, slots)
        assert watch.end()["summary"]["wrong_written"] == 0
        cache[1, 1, 2, 9] ^= 1  # block 1, head 1, token 2: a byte of the scale of K
        watch.begin()
        watch.written(layer, key, value, cache, slots)
        found = watch.end()
        assert (found["summary"]["cells_written"], found["summary"]["wrong_written"]) == (3, 1)
        (wrong,) = found["first_wrong"]
        assert (wrong["block"], wrong["token"], wrong["head"], wrong["byte_in_cell"]) == (1, 2, 1, 9)
        assert wrong["byte"] == ((1 * 2 + 1) * 16 + 2) * 24 + 9

    def test_a_fill_names_the_tokens_that_it_changed(self, watched):
        watch, layer, cache = watched
        layer.kv_cache = cache
        key, value, slots = self.write(watch, layer, cache)
        watch.written(layer, key, value, cache, slots)
        before = cache.untyped_storage().clone()
        cache[2] = 1
        watch.filled(layer, before, cache)
        (fill,) = watch.fills
        assert fill["changed"] == {
            0: {"cells": 1, "of": 3, "tokens_in_block": [8], "bytes": fill["changed"][0]["bytes"]}
        }

    def test_the_record_comes_from_the_script(self):
        open_case, record = script("open_case"), recorded("open_case")
        assert record["release"] == open_case.RELEASE and set(record["engines"]) <= set(open_case.ENGINES)
        for name, engine in record["engines"].items():
            shape, dtype, chunk, requests, runs = open_case.ENGINES[name]
            assert engine["config"] == open_case.SHAPES[shape] and engine["version"].startswith(open_case.RELEASE)
            arguments = open_case.arguments_of(Path("model"), dtype, chunk, requests)
            assert engine["arguments"] == {key: value for key, value in arguments.items() if key != "model"}
            assert [{key: run[key] for key in asked} for run, asked in zip(engine["runs"], runs, strict=True)] == runs
