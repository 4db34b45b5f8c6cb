"""The model unpacked once a machine: right, shared, made by one process, and believed only when it is whole."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvviz.engine import unpacked_weights, weights
from kvviz.engine.unpacked_weights import opened, path_beside, unpack

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).parents[2]
FIELDS = {"tokenizer.ggml.tokens": ["a", "Ġb", "é"], "llama.rope.freq_base": 100_000.0, "llama.block_count": 2}


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture
def model(tmp_path) -> Path:
    """A small GGUF: one tensor as it is, two quantised."""
    path = tmp_path / "small.Q4_1.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", FIELDS["tokenizer.ggml.tokens"])
    writer.add_float32("llama.rope.freq_base", FIELDS["llama.rope.freq_base"])
    writer.add_uint32("llama.block_count", FIELDS["llama.block_count"])
    writer.add_tensor("norm", weight(7))
    for name, kind in (("wide", gguf.GGMLQuantizationType.Q4_1), ("tall", gguf.GGMLQuantizationType.Q8_0)):
        writer.add_tensor(name, gguf.quantize(weight(3, 64), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantised(model: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(model).tensors}


def assert_right(found: unpacked_weights.Unpacked, model: Path) -> None:
    want = dequantised(model)
    assert FIELDS.items() <= found.fields.items()
    assert list(found.tensors) == list(want) == ["norm", "wide", "tall"]
    for name, tensor in found.tensors.items():
        assert tensor.dtype == np.float32 and np.array_equal(tensor, want[name])
        assert tensor.ctypes.data % 4 == 0 and tensor.flags.writeable  # as torch wants them


def never(*_):
    raise AssertionError("the GGUF was read again")


def test_the_second_time_the_gguf_is_not_read(model, monkeypatch):
    assert_right(unpack(model), model)
    assert [path.name for path in sorted(model.parent.iterdir())] == ["small.Q4_1.float32-1.safetensors", model.name]
    want = dequantised(model)
    monkeypatch.setattr(gguf, "GGUFReader", never)
    assert np.array_equal(unpack(model).tensors["tall"], want["tall"])


def test_others_may_read_it_and_with_other_tools(model):
    unpack(model)
    mask = os.umask(0)
    os.umask(mask)
    assert path_beside(model).stat().st_mode & 0o777 == 0o666 & ~mask
    loaded, want = load_file(path_beside(model)), dequantised(model)
    assert loaded.keys() == want.keys() and all(np.array_equal(loaded[name], want[name]) for name in want)


def test_what_a_process_writes_stays_its_own(model):
    before = path_beside(model)
    mine = unpack(model)
    content = before.read_bytes()
    mine.tensors["norm"][:] = 5
    assert before.read_bytes() == content
    assert_right(unpack(model), model)


def of_another_format(content: bytes) -> bytes:
    return content.replace(unpacked_weights.FORMAT.encode(), unpacked_weights.FORMAT.replace("1", "9").encode())


def of_another_source(content: bytes) -> bytes:
    return content.replace(weights.MODEL.gguf_sha256.encode(), b"e" * 64)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[:100],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content.replace(b'"norm"', b'"mron"', 1),
        lambda content: content.replace(b"100000.0", b"100001.0", 1),
        of_another_format,
        of_another_source,
        lambda content: b"GGUF" + content,
        lambda content: (2).to_bytes(8, "little") + b"[]" + content,
        lambda content: (2).to_bytes(8, "little") + b"{}" + content,
    ],
)
def test_a_file_that_is_not_whole_and_ours_is_made_again(model, damage):
    unpack(model)
    right = path_beside(model).read_bytes()
    wrong = damage(right)
    assert wrong != right
    path_beside(model).write_bytes(wrong)
    assert opened(path_beside(model)) is None
    assert_right(unpack(model), model)
    assert path_beside(model).read_bytes() == right


def test_another_sum_does_not_pass_for_the_right_one(model):
    """A header that is consistent but for its sum."""
    unpack(model)
    content = path_beside(model).read_bytes()
    size = int.from_bytes(content[:8], "little")
    stated = json.loads(content[8 : 8 + size])["__metadata__"]["sha256"]
    path_beside(model).write_bytes(content.replace(stated.encode(), b"0" * 64))
    assert opened(path_beside(model)) is None


@pytest.mark.parametrize("when", ["open", "fsync"])
def test_a_folder_that_cannot_be_written_is_a_sentence(model, monkeypatch, capsys, when):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    if when == "open":
        monkeypatch.setattr(unpacked_weights, "_write", refuse)
    else:
        monkeypatch.setattr(unpacked_weights.os, "fsync", refuse)
    assert_right(unpack(model), model)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "(Read-only file system)" in said and str(path_beside(model)) in said
    assert "KVVIZ_CACHE" in said and [path.name for path in model.parent.iterdir()] == [model.name]


def test_nobody_waits_where_nothing_can_be_written(model, monkeypatch):
    if unpacked_weights.fcntl is None:
        pytest.skip("this system has no locks")
    locked = []
    monkeypatch.setattr(unpacked_weights.fcntl, "flock", lambda handle, how: locked.append(how))
    unpack(model)
    assert locked == [unpacked_weights.fcntl.LOCK_EX]
    path_beside(model).unlink()
    monkeypatch.setattr(unpacked_weights.os, "access", lambda folder, how: False)
    assert_right(unpack(model), model)
    assert len(locked) == 1


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_real_read_only_folder(model, capsys):
    model.parent.chmod(0o555)
    try:
        assert_right(unpack(model), model)
    finally:
        model.parent.chmod(0o755)
    assert "Permission denied" in capsys.readouterr().err


def test_a_folder_that_is_read_only_is_fine_when_the_file_is_there(model, monkeypatch, capsys):
    unpack(model)
    monkeypatch.setattr(unpacked_weights, "_write", never)
    assert_right(unpack(model), model)
    assert capsys.readouterr().err == ""


def test_what_a_killed_process_left_goes_after_a_day(model):
    old, young = model.parent / "unpack-old", model.parent / "unpack-young"
    for path in (old, young):
        path.touch()
    past = time.time() - weights.STALE_SECONDS - 60
    os.utime(old, (past, past))
    unpack(model)
    assert (old.exists(), young.exists()) == (False, True)


STARTS = """if True:
    import sys, time
    from pathlib import Path
    from kvviz.engine import unpacked
    made = unpacked_weights._write
    def slow(*arguments):
        print("made", flush=True)
        time.sleep(1)
        made(*arguments)
    unpacked_weights._write = slow
    if "unlocked" in sys.argv:
        unpacked_weights.fcntl = None
    print(float(unpacked_weights.unpack(Path(sys.argv[1])).tensors["tall"].sum()), flush=True)"""


@pytest.mark.parametrize("locks", ["locked", "unlocked"])
def test_processes_that_start_at_once_are_all_right_and_leave_one_file(model, locks):
    command = [sys.executable, "-c", STARTS, str(model), locks]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].split() for process in started]
    want = str(float(dequantised(model)["tall"].sum()))
    assert [lines[-1] for lines in said] == [want] * 3
    assert sorted(path.suffix for path in model.parent.iterdir()) == [".gguf", ".safetensors"]
    if locks == "locked" and unpacked_weights.fcntl:
        assert sum(lines.count("made") for lines in said) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="shared pages are counted in /proc")
def test_processes_share_the_pages(model_path):
    """The real file: what a second process has of its own is far less than the 538 MB that it reads."""
    code = f"""if True:
        import sys
        from pathlib import Path
        from kvviz.engine.unpacked_weights import unpack
        held = unpack(Path({str(model_path)!r}))
        print("there", flush=True)
        sys.stdin.read()"""
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    started = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    try:
        assert [process.stdout.readline() for process in started] == ["there\n"] * 2
        rollup = Path(f"/proc/{started[1].pid}/smaps_rollup").read_text()
    finally:
        for process in started:
            process.communicate()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    assert kib["Rss"] > 500_000 and kib["Private_Clean"] + kib["Private_Dirty"] < 150_000
