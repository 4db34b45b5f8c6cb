"""Tests of the measurement of a class: every result is printed, and no process is left behind."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "room.py"
FAKE_GPU = """#!/bin/sh
case "$*" in *--id=3*) echo 2048, 8192;; *) exit 6;; esac
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in /proc")


@pytest.fixture(scope="module")
def room():
    spec = importlib.util.spec_from_file_location("room", SCRIPT)
    module = sys.modules["room"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def notebook(tmp_path):
    """Return a function that writes a notebook with given cells. Its kernels write their pids into its folder."""

    def write(*sources: str) -> Path:
        pid = "import os; open(f'{os.getpid()}.pid', 'w').close()"
        cells = [nbformat.v4.new_code_cell(source, id=f"c{n}") for n, source in enumerate((pid, *sources))]
        path = tmp_path / "small.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        return path

    return write


def pids(folder: Path) -> list[int]:
    """Return the pids of the kernels that have started in a folder."""
    return [int(path.stem) for path in folder.glob("*.pid")]


def start(path: Path, *options: str, **variables: str) -> subprocess.Popen:
    inside = {**os.environ, "TMPDIR": str(path.parent), **variables}
    command = [sys.executable, str(SCRIPT), str(path), *options]
    return subprocess.Popen(command, env=inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def running(folder: Path) -> list[psutil.Process]:
    """Return the processes whose command line contains the folder: the measurement, and kernels."""
    found = psutil.process_iter(["cmdline", "status"])
    return [p for p in found if p.info["status"] != "zombie" and str(folder) in " ".join(p.info["cmdline"] or ())]


def assert_nothing_is_left(folder: Path) -> None:
    """Assert that no process and no temporary file is left. A killed process has 10 seconds to end."""
    deadline = time.monotonic() + 10
    while running(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running(folder) == [] and list(folder.glob("room-*")) == []


@pytest.mark.slow
def test_kernels_run_together_and_each_has_a_result(notebook):
    path = notebook("import os, sys, time; time.sleep(1)", "print('the GPU is full\\nmore', file=sys.stderr)")
    ran = start(path, "--kernels", "2")
    out, err = ran.communicate(timeout=120)
    assert ran.returncode == 0, out + err
    rows = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+)   (.*)$", out, re.M)
    assert [(row[0], row[3]) for row in rows] == [(n, "ok (stderr: the GPU is full)") for n in "12"]
    assert all(float(row[2]) > float(row[1]) + 0.9 for row in rows)
    assert "2 kernels, small.ipynb" in out and "2 ok, 0 failed" in out
    assert float(re.search(r"largest amount of host memory: ([\d.]+) GiB", out)[1]) > 0.05
    assert len(pids(path.parent)) == 2
    assert_nothing_is_left(path.parent)


@pytest.mark.slow
def test_one_error_gives_exit_status_1_and_the_others_go_on(notebook):
    first = "import pathlib\ntry: pathlib.Path('taken').mkdir()\nexcept FileExistsError: raise ValueError('too late')"
    ran = start(path := notebook(first), "--kernels", "2")
    out, _ = ran.communicate(timeout=120)
    assert ran.returncode == 1 and "1 ok, 1 failed" in out
    assert "code cell 2: ValueError: too late" in out and "   ok" in out
    assert_nothing_is_left(path.parent)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_processes(notebook, number):
    path = notebook("import time; time.sleep(600)")
    ran = start(path, "--kernels", "2")
    try:
        deadline = time.monotonic() + 60
        while len(pids(path.parent)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        seen = len(running(path.parent))  # the measurement, two processes and two kernels
        ran.send_signal(number)
        _, err = ran.communicate(timeout=30)
    finally:
        ran.kill()
    assert seen == 5 and ran.returncode == 130 and "interrupted; all processes were ended" in err
    assert len(pids(path.parent)) == 2
    assert_nothing_is_left(path.parent)


@pytest.mark.slow
def test_a_class_that_takes_too_long_is_ended(notebook):
    ran = start(path := notebook("import time; time.sleep(600)"), "--kernels", "1", "--seconds", "8")
    out, _ = ran.communicate(timeout=60)
    assert ran.returncode == 1 and "not done in time" in out and "0 ok, 1 failed" in out
    assert_nothing_is_left(path.parent)


def test_wrong_arguments_are_refused(notebook, tmp_path):
    for options, said in ((["--kernels", "0"], "--kernels is 0"), (["--seconds", "0"], "--seconds is 0")):
        ran = start(notebook(), *options)
        assert said in ran.communicate(timeout=60)[1] and ran.returncode == 2
    ran = start(tmp_path / "absent.ipynb")
    assert "does not exist" in ran.communicate(timeout=60)[1] and ran.returncode == 2


def test_gpu_memory_is_that_of_the_gpu_that_kernels_take(room, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(FAKE_GPU)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert room.gpu_bytes() == (2 << 30, 8 << 30)
    for hidden in ("", "5"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert room.gpu_bytes() is None
    program.write_text("#!/bin/sh\necho '[N/A], [N/A]'\n")
    assert room.gpu_bytes() is None


def test_a_process_without_a_result_is_reported(room):
    process = subprocess.Popen(["sh", "-c", "echo noise; exit 9"], stdout=subprocess.PIPE, text=True)
    seat = room.Seat(process, time.monotonic())
    assert seat.verdict == "not done in time: only 0 code cells were done"
    seat.follow()
    assert seat.verdict == "the process ended with exit code 9 and without a result"
    assert seat.row(1).split()[:2] == ["1", "-"]
