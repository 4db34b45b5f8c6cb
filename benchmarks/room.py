"""A room of learners on one machine: python benchmarks/room.py [--kernels 30] [NOTEBOOK]

Starts N kernels at the same moment, each with a notebook (default: 03) that is executed from top to bottom by a
process of its own (which is ready by then, as a Jupyter server would be), and prints for each the seconds from there
until its first code cell was done and until all were, and "ok" or its error; beside "ok" stands the first line that
the notebook wrote to stderr, so that a fallback is seen. Then the peak of GPU memory, contexts included (nvidia-smi,
every second), and of host memory (every five seconds; a page that processes share counts once). Exit status 1 if one
fails. Ctrl-C leaves no process.

All kernels use one new Triton cache. That is a room's worst case: nothing is compiled before, all compile the same
kernels at the same time, and all write to one folder. --triton-cache takes a folder that is kept, so that a second
run shows a room that came prepared. Needs psutil; nvidia-smi where there is a GPU.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
POLL_SECONDS = 1.0
HOST_EVERY = 5
"""Host memory is asked for once in so many polls, because counting shared pages takes time."""
SECONDS = 1800
"""How long all of it may take."""


@dataclass
class Seat:
    """One learner: the process that executes a notebook, and what it said until now.

    Attributes:
        first, total: seconds from ``start``, the moment at which all kernels start, until the first code cell was
            done, and until the process ended.
        done: code cells that are done.
        said: "ok", or the error; None if it ended without a word.
    """

    process: subprocess.Popen
    start: float
    first: float | None = None
    total: float | None = None
    done: int = 0
    said: str | None = None
    aside: str = ""

    def begin(self) -> None:
        """Let its kernel start."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def follow(self) -> None:
        """Read what the process tells, until it ends."""
        for line in self.process.stdout:
            told = json.loads(line) if line.startswith("{") else {}
            self.done, self.said = told.get("done", self.done), told.get("said", self.said)
            self.aside = told.get("aside", self.aside)
            if self.first is None and self.done == 1:
                self.first = time.monotonic() - self.start
        self.process.wait()
        self.total = time.monotonic() - self.start

    def row(self, number: int) -> str:
        """What is printed of it."""
        first = "-" if self.first is None else f"{self.first:.1f}"
        total = "-" if self.total is None else f"{self.total:.1f}"
        aside = f" (stderr: {self.aside})" if self.aside else ""
        return f"{number:6} {first:>12} {total:>8}   {self.verdict}{aside}"

    @property
    def verdict(self) -> str:
        """ok, or what went wrong."""
        if self.total is None:
            return f"not done in time: {self.done} code cells were"
        return self.said or f"the process ended with exit code {self.process.returncode} and said nothing"


def one(path: Path, cell_timeout_s: int) -> None:
    """Execute a notebook, and tell on stdout, as JSON lines, which cells are done and how it ended."""
    from kvviz.report.notebook import execute, read

    def watch(number: int, total: int, seconds: float | None) -> None:
        if seconds is not None:
            tell(done=number)

    notebook = read(path)
    tell(ready=True)
    sys.stdin.readline()
    if notebook.problem:
        return tell(said=f"{path} {notebook.problem}")
    node, failure = execute(notebook, watch, cell_timeout_s)
    outputs = [output for cell in node.cells for output in cell.get("outputs", ())]
    aside = "".join(output.text for output in outputs if output.get("name") == "stderr")
    tell(said=f"{failure.where}: {failure.error}" if failure else "ok", aside=aside.strip().split("\n")[0])


def tell(**what) -> None:
    """One line to whoever started this process; it fails when nobody is there any more, which ends this one too."""
    print(json.dumps(what), flush=True)


def seated(kernels: int, path: Path, seconds: int, private: str, triton_cache: str) -> list[Seat]:
    """Start the processes. Their temporary files lie in ``private``, which outlives them however they end."""
    command = [sys.executable, __file__, "--one", "--seconds", str(seconds), str(path)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    inside = {**os.environ, "PYTHONPATH": paths, "TMPDIR": private, "TRITON_CACHE_DIR": triton_cache}
    seats = []
    try:
        for _ in range(kernels):  # sessions of their own: Ctrl-C reaches this process alone, and it ends them
            process = subprocess.Popen(
                command, env=inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            seats.append(Seat(process, time.monotonic()))
        for seat in seats:
            seat.process.stdout.readline()  # it is ready, or has ended
        for seat in seats:
            seat.start = time.monotonic()
            seat.begin()
    except BaseException:
        emptied(seats)
        raise
    return seats


def emptied(seats: list[Seat]) -> None:
    """End every process of every seat, kernels first; those that have ended are left alone."""
    for process in reversed(family(seats)):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    for seat in seats:
        seat.process.wait()


def family(seats: list[Seat]) -> list[psutil.Process]:
    """The processes of all seats that run, each before those that it has started."""
    found = []
    for seat in seats:
        if seat.process.poll() is None:
            try:
                process = psutil.Process(seat.process.pid)
                found += [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
    return found


def host_bytes(processes: list[psutil.Process]) -> int:
    """Memory of processes: a page that n of them share counts as an nth for each (elsewhere than on Linux: not)."""
    total = 0
    for process in processes:
        try:
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.uss)
        except psutil.Error:
            continue
    return total


def gpu_bytes() -> tuple[int, int] | None:
    """Memory used and there on the GPU that kernels take, by nvidia-smi; None where it answers nothing."""
    if shutil.which("nvidia-smi") is None:
        return None
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits", f"--id={number}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        used, there = done.stdout.strip().split("\n")[0].split(",")
        return int(used) << 20, int(there) << 20
    except (subprocess.SubprocessError, ValueError):  # no such GPU; or "[N/A]"
        return None


def run(kernels: int, path: Path, seconds: int, triton_cache: str | None) -> int:
    """Seat them all, wait for all of them, print what happened, and return the exit status."""
    before = gpu_bytes()
    gpu_peak, host_peak, start = before[0] if before else 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="room-", ignore_cleanup_errors=True) as private:
        seats = seated(kernels, path, seconds, private, triton_cache or f"{private}/triton")
        try:
            followers = [threading.Thread(target=seat.follow, daemon=True) for seat in seats]
            for follower in followers:
                follower.start()
            polls = 0
            while any(follower.is_alive() for follower in followers) and time.monotonic() - start < seconds:
                if polls % HOST_EVERY == 0:
                    host_peak = max(host_peak, host_bytes(family(seats)))
                polls += 1
                gpu_peak = max(gpu_peak, (gpu_bytes() or (0, 0))[0])
                time.sleep(POLL_SECONDS)
            failed = sum(seat.verdict != "ok" for seat in seats)
            rows = [seat.row(number) for number, seat in enumerate(seats, 1)]
        finally:
            emptied(seats)
    print(f"kernel {'first cell s':>12} {'all s':>8}   outcome", *rows, sep="\n")
    firsts = [seat.first for seat in seats if seat.first is not None]
    print(
        f"{kernels} kernels, {path.name}, {psutil.cpu_count()} CPU cores: {kernels - failed} ok, {failed} failed; "
        f"{time.monotonic() - start:.1f} s in all, first cells done after at most {max(firsts, default=0):.1f} s"
    )
    print(f"host memory at its peak: {host_peak / GIB:.2f} GiB")
    if before:
        print(
            f"GPU memory at its peak: {gpu_peak / GIB:.2f} of {before[1] / GIB:.1f} GiB, contexts included; "
            f"{before[0] / GIB:.2f} GiB before the start"
        )
    return 1 if failed else 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebook", nargs="?", type=Path, metavar="NOTEBOOK", help="default: notebook 03")
    parser.add_argument("--kernels", type=int, metavar="N", help="default: 30 with a GPU, else 4")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="how long all may take (default: %(default)s)")
    parser.add_argument("--triton-cache", metavar="DIR", help="a folder for compiled kernels (default: a new one)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = options.notebook or ROOT / "notebooks" / "03_reproduce_the_corruption.ipynb"
    if options.one:
        one(path, options.seconds)
        return 0
    kernels = (30 if gpu_bytes() else 4) if options.kernels is None else options.kernels
    if kernels < 1 or options.seconds < 1:
        parser.error(f"--kernels is {kernels} and --seconds {options.seconds}: both must be at least 1")
    if not path.is_file():
        parser.error(f"there is no notebook {path}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(kernels, path.resolve(), options.seconds, options.triton_cache)
    except KeyboardInterrupt:
        print("interrupted; every process was ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
