"""Measures what the transfer of one KV block costs in the NIXL engine, by layout: python benchmarks/nixl_blocks.py

Two processes run on this machine. The second process reads one block of all layers from the cache of the first
process. NIXL uses only the UCX backend, the loopback device and host memory. The script measures four arrangements:

* cross-layer: one buffer holds all L layers. A block is one byte range, and needs 1 descriptor.
* cross-layer, asked by layer: the buffer is the same, but the script asks for L descriptors. The engine can join them.
* per-layer: each layer has its own buffer. A block is L byte ranges, and needs L descriptors.
* K and V apart: K and V of each layer have their own buffers. A block needs 2 L descriptors.

After the first and the last transfer, the script compares the bytes of the block, and checks that no other byte has
changed. If the first process dies, the second process compares the blocks that have arrived, prints one sentence, and
ends with exit status 1. No process is left behind.

The output is JSON. It has one row per number of layers, page size and arrangement. A row contains the number of
descriptors that the script asked for, and the number that the engine posted (from the engine's telemetry). It also
contains the bytes, and the median time of one transfer in microseconds. The script needs Linux. The constant
REQUIREMENT says what to install. If this is missing, the exit status is 2.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

REQUIREMENT = "--no-deps nixl-cu12==1.5.1 nixl==1.5.1"
"""The packages to install, as arguments for pip install. With --no-deps, pip does not change the installed torch."""
ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "WARN"}
NUM_BLOCKS, SOURCE, TARGET = 4, 1, 2
"""The number of blocks of a cache, the id of the block that is read, and the id of the block that is written."""
REPEATS, ROUNDS = 60, 5
"""The number of transfers in one round, and the number of rounds. The rounds of all arrangements alternate, so that a
slow moment affects all arrangements."""
SIZES = ((24, 32_768), (80, 32_768), (80, 2_048))
"""Pairs of (number of layers, bytes of a page)."""
SECONDS = 60.0
"""The most seconds that a process waits for the other process."""
GRACE = 10.0
"""The most seconds for the first process to end after the order to end. After that, it is killed."""
LONG = 1.0
"""During a transfer, the time in seconds between two checks that the other process is alive."""


class Died(RuntimeError):
    """The other process ended too early."""


class Peer:
    """The other process, and a pipe to it.

    Args:
        work: function that the process calls with its end of the pipe.
    """

    def __init__(self, work: Callable) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=work, args=(there,), daemon=True)
        self.process.start()
        there.close()  # only the other process has this end now, so its death closes the pipe

    def check(self) -> None:
        """Raise Died if the process has ended."""
        if not self.process.is_alive():
            raise Died(f"the first process (pid {self.process.pid}) died with exit code {self.process.exitcode}")

    def receive(self):
        """Return the next message of the process. Raise Died if it ended, or TimeoutError."""
        if not self.pipe.poll(SECONDS):
            raise TimeoutError(f"the first process sent nothing for {SECONDS:.0f} seconds")
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(SECONDS)
            self.check()
            raise

    def end(self) -> None:
        """Order the process to end. Kill it if it does not end."""
        with contextlib.suppress(OSError):
            self.pipe.send("done")
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def run_with_peer(work: Callable, measure: Callable) -> list[dict]:
    """Run ``work(pipe)`` in another process and ``measure(peer, readings)`` in this one. Return what it returns.

    Args:
        measure: appends a :class:`Reading` to ``readings`` for each arrangement.

    Raises:
        SystemExit: the other process died too early. The message says how many blocks had arrived.
    """
    peer, readings = Peer(work), []
    try:
        try:
            rows = measure(peer, readings)
        except Exception:
            peer.process.join(LONG)  # the engine may notice the death before the operating system does
            peer.check()
            raise
        peer.check()
        return rows
    except Died as died:
        raise SystemExit(f"{died}. {intact(readings)}. Run the script again.") from died
    finally:
        peer.end()


@dataclass(frozen=True)
class Arrangement:
    """One way to arrange a cache.

    Args:
        num_layers: pages per block.
        page_bytes: bytes of one page.
        ranges: number of byte ranges per block.
        parts: number of descriptors per byte range.
    """

    name: str
    num_layers: int
    page_bytes: int
    ranges: int
    parts: int = 1

    @property
    def range_bytes(self) -> int:
        """Return the size of one byte range."""
        return self.num_layers * self.page_bytes // self.ranges

    @property
    def nbytes(self) -> int:
        """Return the size of the whole cache in bytes."""
        return NUM_BLOCKS * self.num_layers * self.page_bytes

    def descriptors(self, base: int, block: int) -> list[tuple[int, int, int]]:
        """Return ``(address, length, device)`` for each descriptor of a block."""
        size = self.range_bytes // self.parts
        starts = [base + (number * NUM_BLOCKS + block) * self.range_bytes for number in range(self.ranges)]
        return [(start + part * size, size, 0) for start in starts for part in range(self.parts)]

    def block_of(self, cache: np.ndarray, block: int) -> np.ndarray:
        """Return a view of the bytes of a block, shape (ranges, range_bytes)."""
        return cache.reshape(self.ranges, NUM_BLOCKS, self.range_bytes)[:, block]


def arrangements() -> list[Arrangement]:
    """Return all arrangements in the order of the measurement."""
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
    """Return the content of cache ``number`` in the first process. Both processes can compute this content."""
    return np.random.default_rng(number).integers(1, 256, nbytes, dtype=np.uint8)


def registered(agent, cache: np.ndarray):
    """Register a cache with the agent, and return the agent's handle."""
    return agent.register_memory([(cache.ctypes.data, cache.nbytes, 0, "")], "DRAM")


def owner(pipe) -> None:
    """Run the first process: make the caches, send their addresses, and wait for the order to end."""
    from nixl import nixl_agent

    agent = nixl_agent("owner")
    caches = [content(number, one.nbytes) for number, one in enumerate(arrangements())]
    regions = [registered(agent, cache) for cache in caches]
    pipe.send((agent.get_agent_metadata(), [cache.ctypes.data for cache in caches]))
    pipe.poll(
        4 * SECONDS
    )  # returns on the order to end, or if the other process is gone; NIXL's thread answers meanwhile
    for region in regions:
        agent.deregister_memory(region)


def transfer(agent, handle, peer: Peer) -> float:
    """Post a transfer, wait until it is done, and return the microseconds."""
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
    """Raise RuntimeError if the target block differs from the source block, or if another byte has changed."""
    source = one.block_of(content(number, one.nbytes), SOURCE)
    if not np.array_equal(one.block_of(cache, TARGET), source):
        raise RuntimeError(f"{one}: the block that arrived differs from the source")
    if np.count_nonzero(cache) != source.size:
        raise RuntimeError(f"{one}: bytes outside the block have changed")


class Reading:
    """One arrangement in the second process: its cache and its prepared transfer."""

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
        """Run the first transfer, which also makes the connection, and check the block."""
        transfer(self.agent, self.handle, self.peer)
        self.arrived = True
        check(self.one, self.number, self.cache)
        telemetry = self.agent.get_xfer_telemetry(self.handle)
        self.posted, self.nbytes = telemetry.descCount, telemetry.totalBytes

    def again(self) -> None:
        """Run and time some more transfers."""
        self.times += [transfer(self.agent, self.handle, self.peer) for _ in range(REPEATS)]

    def end(self) -> dict:
        """Check the block again, release everything, and return the row of the output."""
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
    """Compare all blocks that have arrived once more, and return their number in words."""
    arrived = [reading for reading in readings if reading.arrived]
    for reading in arrived:
        check(reading.one, reading.number, reading.cache)
    return f"{len(arrived)} of {len(arrangements())} blocks had arrived, and their bytes are right"


def measure(peer: Peer, readings: list[Reading]) -> list[dict]:
    """Run the second process: read the blocks, check them, and measure the times. Return the rows."""
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
    """Start the first process, run as the second, and print JSON."""
    if importlib.util.find_spec("nixl") is None:
        print(f"nixl is not installed: python -m pip install {REQUIREMENT}", file=sys.stderr)
        sys.exit(2)
    os.environ.update(ENVIRONMENT)
    rows = run_with_peer(owner, measure)
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("nixl", "numpy")}
    print(json.dumps({"engine": "NIXL, UCX over loopback", "versions": versions, "verified": True, "rows": rows}))


if __name__ == "__main__":
    main()
