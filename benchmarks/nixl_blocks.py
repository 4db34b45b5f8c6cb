"""What one KV block costs a real transfer engine, by layout: python benchmarks/nixl_blocks.py

Two processes on this machine, NIXL's UCX backend over the loopback device only, host memory only. The second process
reads one block of all layers out of the first one's cache, which is arranged in four ways:

* cross-layer: one buffer, a block is one run of bytes: 1 descriptor;
* cross-layer, asked by layer: the same buffer and L descriptors; neighbours, which the engine may join;
* per-layer: L runs in one buffer per layer: L descriptors;
* K and V apart: 2 L runs: 2 L descriptors.

After the first transfer and after the last, the block's bytes are compared, and those around it must be untouched.
If the first process dies before, while or after a block is read, the second one notices: it compares the blocks that
had arrived, says so in one sentence, and ends with exit status 1. Neither process outlives the other.
Prints JSON: for each number of layers, page size and arrangement the descriptors asked for, those posted (the engine's
own telemetry), bytes, and the median time of one transfer in microseconds. Needs Linux, torch and nixl:
pip install --no-deps nixl-cu12==1.5.1 nixl==1.5.1
"""

import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "WARN"}
NUM_BLOCKS, SOURCE, TARGET = 4, 1, 2
REPEATS, ROUNDS = 60, 5
SIZES = ((24, 32_768), (80, 32_768), (80, 2_048))
SECONDS = 60.0
"""How long either process waits for the other."""
GRACE = 10.0
"""How long the first process has to end when it is told to."""
LONG = 1.0
"""A transfer that takes longer than this may have lost its other side."""


class Died(RuntimeError):
    """The other process ended while it was needed."""


class Peer:
    """Another process and a pipe to it: noticed when it dies, and never left behind.

    Args:
        work: called there with its end of the pipe.
    """

    def __init__(self, work: Callable) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=work, args=(there,), daemon=True)
        self.process.start()
        there.close()  # the other process alone has it now, so that its end is seen here

    def check(self) -> None:
        """Raise Died if it has."""
        if not self.process.is_alive():
            raise Died(f"the first process (pid {self.process.pid}) died with exit code {self.process.exitcode}")

    def receive(self):
        """What it sends next. Raises TimeoutError, or Died."""
        if not self.pipe.poll(SECONDS):
            raise TimeoutError(f"the first process said nothing for {SECONDS:.0f} seconds")
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(SECONDS)
            self.check()
            raise

    def end(self) -> None:
        """Tell it to end, and end it if it does not."""
        with contextlib.suppress(OSError):
            self.pipe.send("done")
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def beside(work: Callable, measure: Callable) -> list[dict]:
    """Run ``work(pipe)`` in another process and ``measure(peer, readings)`` here, which adds to the readings.

    Raises:
        SystemExit: the other process died before it was told to end; the message says what had arrived.
    """
    peer, readings = Peer(work), []
    try:
        try:
            rows = measure(peer, readings)
        except Exception:
            peer.process.join(LONG)  # an engine may notice before the system does
            peer.check()
            raise
        peer.check()
        return rows
    except Died as died:
        raise SystemExit(f"{died}: {intact(readings)}; run the script again") from died
    finally:
        peer.end()


@dataclass(frozen=True)
class Arrangement:
    """``runs`` stretches of bytes a block, each described by ``parts`` descriptors, for ``num_layers`` pages."""

    name: str
    num_layers: int
    page_bytes: int
    runs: int
    parts: int = 1

    @property
    def run_bytes(self) -> int:
        """Bytes of one stretch."""
        return self.num_layers * self.page_bytes // self.runs

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return NUM_BLOCKS * self.num_layers * self.page_bytes

    def descriptors(self, base: int, block: int) -> list[tuple[int, int, int]]:
        """``(address, length, device)`` of a block's descriptors."""
        size = self.run_bytes // self.parts
        starts = [base + (run * NUM_BLOCKS + block) * self.run_bytes for run in range(self.runs)]
        return [(start + part * size, size, 0) for start in starts for part in range(self.parts)]

    def block_of(self, cache: np.ndarray, block: int) -> np.ndarray:
        """A block's bytes, run by run, as a view."""
        return cache.reshape(self.runs, NUM_BLOCKS, self.run_bytes)[:, block]


def arrangements() -> list[Arrangement]:
    """All that are measured, in order."""
    made = []
    for layers, page in SIZES:
        made += [
            Arrangement("cross-layer", layers, page, 1),
            Arrangement("cross-layer, asked by layer", layers, page, 1, layers),
            Arrangement("per-layer", layers, page, layers),
            Arrangement("K and V apart", layers, page, 2 * layers),
        ]
    return made


def content(number: int, nbytes: int) -> np.ndarray:
    """What the first process's cache of an arrangement holds; both processes can say it."""
    return np.random.default_rng(number).integers(1, 256, nbytes, dtype=np.uint8)


def registered(agent, cache: np.ndarray):
    """Register a cache, and return what the agent calls it."""
    return agent.register_memory([(cache.ctypes.data, cache.nbytes, 0, "")], "DRAM")


def owner(pipe) -> None:
    """The first process: owns the caches, tells where they are, waits."""
    from nixl import nixl_agent

    agent = nixl_agent("owner")
    caches = [content(number, one.nbytes) for number, one in enumerate(arrangements())]
    regions = [registered(agent, cache) for cache in caches]
    pipe.send((agent.get_agent_metadata(), [cache.ctypes.data for cache in caches]))
    pipe.poll(4 * SECONDS)  # told to end, or the other side is gone; meanwhile the agent's own thread answers
    for region in regions:
        agent.deregister_memory(region)


def transfer(agent, handle, peer: Peer) -> float:
    """Post a transfer and wait until it is done: microseconds."""
    start = time.perf_counter()
    state = agent.transfer(handle)
    while state == "PROC":
        waited = time.perf_counter() - start
        if waited > LONG:
            peer.check()
        if waited > SECONDS:
            raise TimeoutError(f"a transfer was not done after {SECONDS:.0f} seconds")
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"a transfer ended in state {state}")
    return 1e6 * (time.perf_counter() - start)


def check(one: Arrangement, number: int, cache: np.ndarray) -> None:
    """Raise if the target block is not the source block, or another byte was touched."""
    source = one.block_of(content(number, one.nbytes), SOURCE)
    if not np.array_equal(one.block_of(cache, TARGET), source):
        raise RuntimeError(f"{one}: the block did not arrive as it was")
    if np.count_nonzero(cache) != source.size:
        raise RuntimeError(f"{one}: bytes outside the block were written")


class Reading:
    """One arrangement as the second process reads it: its cache, and the transfer made ready."""

    def __init__(self, agent, peer: Peer, name: str, number: int, one: Arrangement, base: int) -> None:
        self.agent, self.peer, self.number, self.one, self.times = agent, peer, number, one, []
        self.arrived = False
        self.cache = np.zeros(one.nbytes, np.uint8)
        self.region = registered(agent, self.cache)
        here, there = one.descriptors(self.cache.ctypes.data, TARGET), one.descriptors(base, SOURCE)
        self.sides = [
            agent.prep_xfer_dlist(whose, descriptors, "DRAM")
            for whose, descriptors in (("NIXL_INIT_AGENT", here), (name, there))
        ]
        self.asked, every = len(here), list(range(len(here)))
        self.handle = agent.make_prepped_xfer("READ", self.sides[0], every, self.sides[1], every)

    def first(self) -> None:
        """The transfer that is checked; it also makes the connection."""
        transfer(self.agent, self.handle, self.peer)
        self.arrived = True
        check(self.one, self.number, self.cache)
        told = self.agent.get_xfer_telemetry(self.handle)
        self.posted, self.nbytes = told.descCount, told.totalBytes

    def again(self) -> None:
        """Some that are timed."""
        self.times += [transfer(self.agent, self.handle, self.peer) for _ in range(REPEATS)]

    def end(self) -> dict:
        """Give everything back; the row."""
        check(self.one, self.number, self.cache)
        self.handle.release()
        for side in self.sides:
            side.release()
        self.agent.deregister_memory(self.region)
        return {
            "layers": self.one.num_layers,
            "page_bytes": self.one.page_bytes,
            "layout": self.one.name,
            "asked": self.asked,
            "posted": self.posted,
            "bytes": self.nbytes,
            "microseconds": round(statistics.median(self.times), 1),
        }


def intact(readings: list[Reading]) -> str:
    """How many blocks had arrived, said when each has been compared once more."""
    arrived = [reading for reading in readings if reading.arrived]
    for reading in arrived:
        check(reading.one, reading.number, reading.cache)
    return f"{len(arrived)} of {len(arrangements())} blocks had arrived and are intact"


def measure(peer: Peer, readings: list[Reading]) -> list[dict]:
    """The second process: reads, checks and times."""
    from nixl import nixl_agent, nixl_agent_config

    metadata, bases = peer.receive()
    agent = nixl_agent("reader", nixl_agent_config(capture_telemetry=True))
    name = agent.add_remote_agent(metadata)
    name = name.decode() if isinstance(name, bytes) else name
    for number, (one, base) in enumerate(zip(arrangements(), bases, strict=True)):
        readings.append(Reading(agent, peer, name, number, one, base))
    for reading in readings:
        reading.first()
    for _ in range(ROUNDS):
        for reading in readings:
            reading.again()
    return [reading.end() for reading in readings]


def main() -> None:
    """Start the first process, be the second, print JSON."""
    os.environ.update(ENVIRONMENT)
    rows = beside(owner, measure)
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("nixl", "numpy")}
    print(json.dumps({"engine": "NIXL, UCX over loopback", "versions": versions, "verified": True, "rows": rows}))


if __name__ == "__main__":
    main()
