"""The unpacked model: correct, shared by all processes, made by one of them, and made again if it is damaged."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import filelock
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from kvviz.engine import unpacked_weights, weights
from kvviz.engine.unpacked_weights import opened, path_beside, unpack
from kvviz.files import STALE_SECONDS

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).parents[2]
FIELDS = {"tokenizer.ggml.tokens": ["a", "Ġb", "é"], "llama.rope.freq_base": 100_000.0, "llama.block_count": 2}


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture
def model(tmp_path) -> Path:
    """A small GGUF file with one tensor that is not quantised, and two quantised tensors."""
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
    assert found.tensors.keys() == want.keys() == {"norm", "wide", "tall"}
    for name, tensor in found.tensors.items():
        assert tensor.dtype == np.float32 and np.array_equal(tensor, want[name])
        assert tensor.ctypes.data % 4 == 0 and tensor.flags.writeable  # as torch wants them


def never(*_):
    raise AssertionError("the GGUF was read again")


def test_the_second_time_the_gguf_is_not_read(model, monkeypatch):
    assert_right(unpack(model), model)
    assert [path.name for path in sorted(model.parent.iterdir())] == [
        "small.Q4_1.float32-2.safetensors",
        model.name,
        "unpack.lock",
    ]
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
    return content.replace(
        unpacked_weights.FORMAT.encode(), unpacked_weights.FORMAT.replace("float32 2", "float32 9").encode()
    )


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
        lambda content: content.replace(b'"shape":[3,64]', b'"shape":[64,3]', 1),
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
    """Only the sum in the header is wrong."""
    unpack(model)
    content = path_beside(model).read_bytes()
    size = int.from_bytes(content[:8], "little")
    stated = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["kvviz"])["sha256"]
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
    assert "KVVIZ_CACHE" in said and sorted(path.name for path in model.parent.iterdir()) == [model.name, "unpack.lock"]


def test_nobody_waits_if_nothing_can_be_written(model, monkeypatch):
    with filelock.FileLock(model.parent / "unpack.lock"):
        monkeypatch.setattr(unpacked_weights.os, "access", lambda folder, how: False)
        assert_right(unpack(model), model)


def test_nobody_waits_on_a_file_system_without_locks(model, monkeypatch):
    def refuse(path):
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(unpacked_weights, "_locked", refuse)
    assert_right(unpack(model), model)


HOLDS = """if True:
    import os, sys, time
    from pathlib import Path
    from kvviz.engine import unpacked_weights
    with unpacked_weights._only_one(Path(sys.argv[1])):
        print(os.getpid(), flush=True)
        sys.stdin.read()"""


@pytest.fixture
def holder(model) -> Iterator[subprocess.Popen]:
    """Another process that holds the lock until its standard input is closed; its ``pid`` is the process id."""
    command = [sys.executable, "-c", HOLDS, str(model.parent)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == str(process.pid)
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_who_is_waited_for_is_said_and_the_wait_ends(model, holder, monkeypatch, capsys):
    monkeypatch.setattr(unpacked_weights, "WAIT_SECONDS", 1)
    with pytest.raises(TimeoutError, match=f"process {holder.pid} has been unpacking the model for more than 1 s"):
        unpack(model)
    said = capsys.readouterr().err
    assert re.fullmatch(
        rf"Waiting for process {holder.pid}, which unpacks the model, until \d\d:\d\d:\d\d at the latest.\n", said
    )


def test_a_wait_goes_on_when_the_other_process_is_ready(model, holder):
    threading.Timer(0.5, holder.stdin.close).start()
    assert_right(unpack(model), model)


def test_a_process_that_was_killed_holds_nothing(model, holder, capsys):
    holder.kill()
    holder.wait()
    assert_right(unpack(model), model)
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_a_sentence(model, monkeypatch, capsys):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(unpacked_weights, "save_file", full)
    assert_right(unpack(model), model)
    said = capsys.readouterr().err
    assert "No space left on device" in said and "600 MB" in said and said.count("\n") == 1


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
        path.mkdir()
        (path / ".tmp1234").touch()
    past = time.time() - STALE_SECONDS - 60
    os.utime(old, (past, past))
    unpack(model)
    assert (old.exists(), young.exists()) == (False, True)


STARTS = """if True:
    import sys, time
    from pathlib import Path
    from kvviz.engine import unpacked_weights
    made = unpacked_weights._write
    def slow(*arguments):
        print("made", flush=True)
        time.sleep(1)
        made(*arguments)
    unpacked_weights._write = slow
    if "unlocked" in sys.argv:
        def refuse(path):
            raise NotImplementedError
        unpacked_weights._locked = refuse
    print(float(unpacked_weights.unpack(Path(sys.argv[1])).tensors["tall"].sum()), flush=True)"""


@pytest.mark.parametrize("locks", ["locked", "unlocked"])
def test_processes_that_start_at_once_are_all_right_and_leave_one_file(model, locks):
    command = [sys.executable, "-c", STARTS, str(model), locks]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].split() for process in started]
    want = str(float(dequantised(model)["tall"].sum()))
    assert [lines[-1] for lines in said] == [want] * 3
    assert {path.suffix for path in model.parent.iterdir()} - {".lock"} == {".gguf", ".safetensors"}
    if locks == "locked":
        assert sum(lines.count("made") for lines in said) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="shared pages are counted in /proc")
def test_processes_share_the_pages(model_path):
    """Two processes read the 540 MB of the real file. The file's pages are shared, and no page of it is copied."""
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
        whole = [mapped_kib(Path(f"/proc/{process.pid}/smaps"), path_beside(model_path).name) for process in started]
    finally:
        for process in started:
            process.communicate()
    print(whole)
    for kib in whole:
        assert kib["Rss"] > 520_000 and kib["Shared_Clean"] > 0.99 * kib["Rss"]
        assert kib["Private_Dirty"] == kib["Shared_Dirty"] == 0


def mapped_kib(smaps: Path, name: str) -> Counter:
    """Return how much of the file ``name`` a process has in memory, in KiB, by the kinds that the kernel counts."""
    found, here = Counter(), False
    for line in smaps.read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):  # a line with the addresses of a mapping, and the file if there is one
            here = line.endswith(name)
        elif here and rest[-1:] == ["kB"]:
            found[first.rstrip(":")] += int(rest[0])
    return found
