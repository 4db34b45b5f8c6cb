"""Measures a class that shares one machine: python benchmarks/room.py [--kernels 30] [NOTEBOOK]

The script starts N processes. When all processes are ready, each process runs one notebook from top to bottom. The
default is notebook 03. For each process, the script prints a line. The line has the seconds until the first code cell
was done, the seconds until all code cells were done, and "ok" or the error. If the notebook wrote to stderr, the line
also has the first line of that text. For example, a notebook writes to stderr if the GPU is full.

Then the script prints the most GPU memory that was in use at one time, with CUDA contexts. It asks nvidia-smi once per
second. It also prints the most host memory, which it measures every five seconds. Memory that several processes share
is counted once. If a notebook failed, the exit status is 1. Ctrl-C ends all processes.

All processes use one new folder for the Triton cache. This is the worst case. No Triton kernel is compiled before, and
all processes compile the same code at the same time. With --triton-cache the folder is kept. A second run then measures
a class that starts with compiled code. The script needs psutil. On a machine with a GPU, it also needs nvidia-smi.
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
"""The seconds between two measurements of GPU memory."""
HOST_EVERY = 5
"""Host memory is measured once for this number of measurements of GPU memory, because it takes more time."""
SECONDS = 1800
"""The most seconds for all notebooks together. This is also the limit for each notebook cell."""


@dataclass
class Seat:
    """The process of one learner, and its results up to now.

    Attributes:
        process: runs the notebook.
        start: the time at which the notebook was started, on the clock ``time.monotonic()``.
        first: seconds from ``start`` until the first code cell was done.
        total: seconds from ``start`` until the process ended.
        done: number of code cells that are done.
        result: "ok", or the error. None if the process has not sent a result.
        stderr: the first line that the notebook wrote to stderr, or "".
    """

    process: subprocess.Popen
    start: float
    first: float | None = None
    total: float | None = None
    done: int = 0
    result: str | None = None
    stderr: str = ""

    def begin(self) -> None:
        """Tell the process to run the notebook."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def follow(self) -> None:
        """Read the messages of the process until it ends."""
        for line in self.process.stdout:
            message = json.loads(line) if line.startswith("{") else {}
            self.done, self.result = message.get("done", self.done), message.get("result", self.result)
            self.stderr = message.get("stderr", self.stderr)
            if self.first is None and self.done == 1:
                self.first = time.monotonic() - self.start
        self.process.wait()
        self.total = time.monotonic() - self.start

    def row(self, number: int) -> str:
        """Return the line of output for this process."""
        first = "-" if self.first is None else f"{self.first:.1f}"
        total = "-" if self.total is None else f"{self.total:.1f}"
        stderr = f" (stderr: {self.stderr})" if self.stderr else ""
        return f"{number:6} {first:>12} {total:>8}   {self.verdict}{stderr}"

    @property
    def verdict(self) -> str:
        """Return "ok" or the error."""
        if self.total is None:
            return f"not done in time: only {self.done} code cells were done"
        return self.result or f"the process ended with exit code {self.process.returncode} and without a result"


def one(path: Path, cell_timeout_s: int) -> None:
    """Run a notebook. Write the number of cells that are done, and the result, to stdout as JSON lines."""
    from kvviz.report.notebook import execute, read

    def watch(number: int, total: int, seconds: float | None) -> None:
        if seconds is not None:
            send(done=number)

    notebook = read(path)
    send(ready=True)
    sys.stdin.readline()
    if notebook.problem:
        return send(result=f"{path} {notebook.problem}")
    node, failure = execute(notebook, watch, cell_timeout_s)
    outputs = [output for cell in node.cells for output in cell.get("outputs", ())]
    stderr = "".join(output.text for output in outputs if output.get("name") == "stderr")
    send(result=f"{failure.where}: {failure.error}" if failure else "ok", stderr=stderr.strip().split("\n")[0])


def send(**message) -> None:
    """Send a message to the parent process. If the parent process has ended, end with an error."""
    print(json.dumps(message), flush=True)


def start_all(kernels: int, path: Path, seconds: int, private: str, triton_cache: str) -> list[Seat]:
    """Start the processes. All temporary files go into the folder ``private``, which the caller must remove."""
    command = [sys.executable, __file__, "--one", "--seconds", str(seconds), str(path)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    inside = {**os.environ, "PYTHONPATH": paths, "TMPDIR": private, "TRITON_CACHE_DIR": triton_cache}
    seats = []
    try:
        # Each process gets a new session, so that Ctrl-C reaches only this process, which then ends all others.
        for _ in range(kernels):
            process = subprocess.Popen(
                command, env=inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            seats.append(Seat(process, time.monotonic()))
        for seat in seats:
            seat.process.stdout.readline()  # returns when the process is ready or has ended
        for seat in seats:
            seat.start = time.monotonic()
            seat.begin()
    except BaseException:
        end_all(seats)
        raise
    return seats


def end_all(seats: list[Seat]) -> None:
    """End all processes of all seats. A process ends before the process that started it."""
    for process in reversed(family(seats)):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    for seat in seats:
        seat.process.wait()


def family(seats: list[Seat]) -> list[psutil.Process]:
    """Return the running processes of all seats. Each process comes before the processes that it started."""
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
    """Return the memory of processes in bytes. On Linux, memory that several processes share is counted once."""
    total = 0
    for process in processes:
        try:
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.uss)
        except psutil.Error:
            continue
    return total


def gpu_bytes() -> tuple[int, int] | None:
    """Return the used and the total memory of the GPU in bytes. If nvidia-smi gives no answer, return None."""
    if shutil.which("nvidia-smi") is None:
        return None
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits", f"--id={number}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        used, total = done.stdout.strip().split("\n")[0].split(",")
        return int(used) << 20, int(total) << 20
    except (subprocess.SubprocessError, ValueError):  # this GPU does not exist, or the answer is "[N/A]"
        return None


def run(kernels: int, path: Path, seconds: int, triton_cache: str | None) -> int:
    """Start all processes, wait until all have ended, print the results, and return the exit status."""
    before = gpu_bytes()
    gpu_peak, host_peak, start = before[0] if before else 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="room-", ignore_cleanup_errors=True) as private:
        seats = start_all(kernels, path, seconds, private, triton_cache or f"{private}/triton")
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
            end_all(seats)
    print(f"kernel {'first cell s':>12} {'total s':>8}   outcome", *rows, sep="\n")
    firsts = [seat.first for seat in seats if seat.first is not None]
    print(
        f"{kernels} kernels, {path.name}, {psutil.cpu_count()} CPU cores: {kernels - failed} ok, {failed} failed; "
        f"{time.monotonic() - start:.1f} s in total, first cells done after at most {max(firsts, default=0):.1f} s"
    )
    print(f"largest amount of host memory: {host_peak / GIB:.2f} GiB")
    if before:
        print(
            f"largest amount of GPU memory: {gpu_peak / GIB:.2f} of {before[1] / GIB:.1f} GiB, with CUDA contexts; "
            f"{before[0] / GIB:.2f} GiB before the start"
        )
    return 1 if failed else 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebook", nargs="?", type=Path, metavar="NOTEBOOK", help="default: notebook 03")
    parser.add_argument("--kernels", type=int, metavar="N", help="default: 30 with a GPU, else 4")
    parser.add_argument(
        "--seconds", type=int, default=SECONDS, help="seconds that all notebooks may take (default: %(default)s)"
    )
    parser.add_argument("--triton-cache", metavar="DIR", help="folder for compiled kernels (default: a new folder)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    path = options.notebook or ROOT / "notebooks" / "03_reproduce_the_corruption.ipynb"
    if options.one:
        one(path, options.seconds)
        return 0
    kernels = (30 if gpu_bytes() else 4) if options.kernels is None else options.kernels
    for name, number in (("--kernels", kernels), ("--seconds", options.seconds)):
        if number < 1:
            parser.error(f"{name} is {number}, but it must be at least 1")
    if not path.is_file():
        parser.error(f"the notebook {path} does not exist")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(kernels, path.resolve(), options.seconds, options.triton_cache)
    except KeyboardInterrupt:
        print("interrupted; all processes were ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
