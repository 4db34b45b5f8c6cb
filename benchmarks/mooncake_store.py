"""What a shared store knows of a KV block's layout: python benchmarks/mooncake_store.py

A block of all layers is put into a Mooncake store from a cross-layer buffer, in which it is one run of bytes. Readers
with one buffer per layer fetch it: one as it was laid out, one that takes it for the K halves of all layers and then
the V halves. The store answers both alike. Then the spans of the layers' views of one cross-layer storage are
registered with the transfer engine, one by one: they overlap, and all but the first are refused.

The store listens on every address of the machine whatever is set. So this script runs itself in a network namespace
of its own (``unshare``), with nothing but the loopback device. If the store's master dies midway, the script says in
one sentence what had been fetched and ends with exit status 1; no process is left behind. Prints JSON. Needs Linux,
util-linux, the library libibverbs1 (apt install --no-install-recommends libibverbs1), and:
pip install mooncake-transfer-engine-non-cuda==0.3.13.post1
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

NUM_LAYERS, NUM_BLOCKS, PAGE, BLOCK = 24, 4, 4_352, 1
RPC, METRICS = 50_051, 50_052
KEY = "a block"
UP = 1
SECONDS = 30.0
"""How long the store's master has to start."""
LONGEST = 150.0
"""How long all of it may take. A client whose master is gone tries 20 times, for 90 seconds, and hears nobody."""
BOUND = ("setpriv", "--pdeathsig", "KILL")
"""Ends a process with the one that started it."""


def alone() -> bool:
    """Whether this process sees the loopback device and no other."""
    return {name for _, name in socket.if_nameindex()} == {"lo"}


def loopback_up() -> None:
    """Switch the loopback device of this namespace on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", UP)
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS


def in_a_namespace() -> int:
    """Run this script again with a network of its own; its exit status."""
    command = [
        "unshare",
        "--net",
        *([] if os.geteuid() == 0 else ["--map-root-user"]),
        *BOUND,
        sys.executable,
        __file__,
        "--inside",
    ]
    try:
        return subprocess.run(command, check=False, timeout=LONGEST).returncode
    except subprocess.TimeoutExpired:
        sys.exit(f"the store gave no answer for {LONGEST:.0f} seconds and was ended: run the script again")


def address(array: np.ndarray) -> int:
    """Where an array starts in memory."""
    return array.ctypes.data


def spans_of_layers(cross_layer: np.ndarray) -> list[tuple[int, int]]:
    """``(address, length)`` from the first to the last byte of each layer's view of a cross-layer storage."""
    reach = (NUM_BLOCKS - 1) * NUM_LAYERS * PAGE + PAGE
    return [(address(cross_layer) + layer * PAGE, reach) for layer in range(NUM_LAYERS)]


def registered(cross_layer: np.ndarray) -> dict:
    """How many spans the transfer engine accepts: layer by layer, and the whole storage at once."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the transfer engine did not start")
    codes = [engine.register_memory(*span) for span in spans_of_layers(cross_layer)]
    for span, code in zip(spans_of_layers(cross_layer), codes, strict=True):
        if code == 0:
            engine.unregister_memory(span[0])
    whole = engine.register_memory(address(cross_layer), cross_layer.nbytes)
    return {"layers": NUM_LAYERS, "accepted": codes.count(0), "codes": sorted(set(codes)), "whole_storage": whole}


def pieces(buffers: list[np.ndarray], as_laid_out: bool) -> tuple[list[int], list[int]]:
    """Addresses and lengths to scatter a block into: page by page, or all K halves and then all V halves."""
    if as_laid_out:
        return [address(buffer) for buffer in buffers], [PAGE] * NUM_LAYERS
    halves = [address(buffer) + half * PAGE // 2 for half in range(2) for buffer in buffers]
    return halves, [PAGE // 2] * (2 * NUM_LAYERS)


def stored(cross_layer: np.ndarray, rows: list[dict]) -> dict:
    """Put the block once and fetch it twice; what was fetched is added to the rows."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", f"127.0.0.1:{RPC}"):
        raise RuntimeError("the store did not start")
    size, buffers = NUM_LAYERS * PAGE, [np.zeros(PAGE, np.uint8) for _ in range(NUM_LAYERS)]
    if any(store.register_buffer(address(array), array.nbytes) for array in (cross_layer, *buffers)):
        raise RuntimeError("a buffer could not be registered")
    if store.put_from(KEY, address(cross_layer) + BLOCK * size, size):
        raise RuntimeError("the block could not be stored")
    block = cross_layer[BLOCK * size : (BLOCK + 1) * size].reshape(NUM_LAYERS, PAGE)
    for reader, as_laid_out in (("page by page, as it was put", True), ("K of all layers, then V", False)):
        places, lengths = pieces(buffers, as_laid_out)
        (answer,) = store.batch_get_into_multi_buffers([KEY], [places], [lengths])
        if answer != size:
            raise RuntimeError(f"the block could not be fetched: the store answered {answer}, not its {size} bytes")
        right = sum(bool((buffer == page).all()) for buffer, page in zip(buffers, block, strict=True))
        rows.append(
            {"reader": reader, "answer": answer, "pieces": len(places), "right_pages": right, "pages": NUM_LAYERS}
        )
    size_told = store.get_size(KEY)
    if size_told != size:
        raise RuntimeError(f"the store answered {size_told} when it was asked for the size of a block of {size} bytes")
    store.remove(KEY)
    store.close()
    return {"object_bytes": size_told, "rows": rows}


def master() -> subprocess.Popen:
    """The store's master program, listening on the loopback device."""
    import mooncake

    program = Path(mooncake.__file__).parent / "mooncake_master"
    ports = ["--rpc_address=127.0.0.1", f"--rpc_port={RPC}", "--metrics_host=127.0.0.1", f"--metrics_port={METRICS}"]
    started = subprocess.Popen([*BOUND, program, *ports], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and started.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", RPC)) == 0:
                return started
        time.sleep(0.1)
    started.kill()
    raise RuntimeError("the store's master did not start")


def watched(server: subprocess.Popen, cross_layer: np.ndarray) -> dict:
    """What the store and the transfer engine say.

    Raises:
        SystemExit: the master died before all was said; the message says what had been fetched until then.
    """
    rows, before = [], cross_layer.copy()
    try:
        found = {"store": stored(cross_layer, rows), "registration": registered(cross_layer)}
    except RuntimeError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(1)  # its sockets close before it is seen to be dead
        if server.returncode is None:
            raise
    if server.poll() is None:
        return found
    state = "is intact" if np.array_equal(cross_layer, before) else "has changed"
    raise SystemExit(
        f"the store's master (pid {server.pid}) died with exit code {server.returncode}: {len(rows)} of 2 readers had "
        f"the block, and the buffer that it was put from {state}; run the script again"
    )


def inside() -> None:
    """What happens in the namespace."""
    if not alone():
        raise RuntimeError("this network is not the script's own: start it without --inside")
    loopback_up()
    cross_layer = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * NUM_LAYERS * PAGE, dtype=np.uint8)
    server = master()
    try:
        found = watched(server, cross_layer)
    finally:
        server.kill()  # it keeps nothing
        server.wait()
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    versions["mooncake"] = importlib.metadata.version("mooncake-transfer-engine-non-cuda")
    print(
        json.dumps({"engine": "Mooncake store and transfer engine, TCP over loopback", "versions": versions, **found})
    )


if __name__ == "__main__":
    if "--inside" in sys.argv:
        inside()
    elif shutil.which("unshare") is None or shutil.which("setpriv") is None:
        sys.exit(
            "this needs `unshare` and `setpriv` (util-linux): the store listens on every address, and must not on a "
            "real network"
        )
    else:
        sys.exit(in_a_namespace())
