"""Shows that a Mooncake store does not check the layout of a KV block: python benchmarks/mooncake_store.py

The script puts a block of all layers into a store. The block comes from a cross-layer buffer, so its bytes are
adjacent. Two readers with one buffer per layer fetch the block. The first reader uses the correct order of the bytes.
The second reader assumes that the K halves of all layers come before all V halves. The store gives both readers the
same answer. Then the script registers the byte range of each layer of a cross-layer storage with the transfer engine.
These byte ranges overlap. The engine accepts only the first of them.

The store listens on every network address of the machine, and no option changes this. So the script runs itself in a
separate network namespace (``unshare``) that has only the loopback device. If the store's master process dies, the
script prints one sentence and ends with exit status 1. No process is left behind.

The output is JSON. The script needs Linux, util-linux, and the library libibverbs1
(apt install --no-install-recommends libibverbs1). The constant REQUIREMENT says what else to install. Without it, the
exit status is 2.
"""

import contextlib
import fcntl
import importlib.metadata
import importlib.util
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

REQUIREMENT = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
"""The package to install, as an argument for pip install."""
NUM_LAYERS, NUM_BLOCKS, PAGE, BLOCK = 24, 4, 4_352, 1
"""The number of layers, the number of blocks, the size of a page in bytes, and the id of the block that is stored."""
RPC, METRICS = 50_051, 50_052
KEY = "a block"
UP = 1
"""The flag IFF_UP of Linux, which switches on a network device."""
SECONDS = 30.0
"""The most seconds for the start of the store's master process."""
LONGEST = 150.0
"""The most seconds for the whole script. A client without a master tries 20 times, which takes 90 seconds."""
BOUND = ("setpriv", "--pdeathsig", "KILL")
"""The first words of a command. With them, Linux kills the command when the process that started it ends."""


def alone() -> bool:
    """Return True if the loopback device is the only network device of this process."""
    return {name for _, name in socket.if_nameindex()} == {"lo"}


def loopback_up() -> None:
    """Switch on the loopback device of this namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", UP)
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS


def in_a_namespace(script: str = __file__, *arguments: str, longest: float = LONGEST) -> int:
    """Run a script again in a separate network namespace, and return its exit status."""
    command = [
        "unshare",
        "--net",
        *([] if os.geteuid() == 0 else ["--map-root-user"]),
        *BOUND,
        sys.executable,
        script,
        "--inside",
        *arguments,
    ]
    try:
        return subprocess.run(command, check=False, timeout=longest).returncode
    except subprocess.TimeoutExpired:
        sys.exit(f"{Path(script).name} gave no answer for {longest:.0f} seconds and was stopped: run the script again")


def address(array: np.ndarray) -> int:
    """Return the address of an array."""
    return array.ctypes.data


def spans_of_layers(cross_layer: np.ndarray) -> list[tuple[int, int]]:
    """Return ``(address, length)`` of the byte range from the first to the last byte of each layer."""
    reach = (NUM_BLOCKS - 1) * NUM_LAYERS * PAGE + PAGE
    return [(address(cross_layer) + layer * PAGE, reach) for layer in range(NUM_LAYERS)]


def registered(cross_layer: np.ndarray) -> dict:
    """Register the span of each layer, then the whole storage. Return the answers of the transfer engine."""
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
    """Return the addresses and lengths of the parts of a block, in one of two orders.

    The parts are pages, or first all K halves and then all V halves.
    """
    if as_laid_out:
        return [address(buffer) for buffer in buffers], [PAGE] * NUM_LAYERS
    halves = [address(buffer) + half * PAGE // 2 for half in range(2) for buffer in buffers]
    return halves, [PAGE // 2] * (2 * NUM_LAYERS)


def stored(cross_layer: np.ndarray, rows: list[dict]) -> dict:
    """Put the block once and fetch it twice. Append one row per fetch to ``rows``, and return the result."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", f"127.0.0.1:{RPC}"):
        raise RuntimeError("the store did not start")
    size, buffers = NUM_LAYERS * PAGE, [np.zeros(PAGE, np.uint8) for _ in range(NUM_LAYERS)]
    if any(store.register_buffer(address(array), array.nbytes) for array in (cross_layer, *buffers)):
        raise RuntimeError("the store could not register a buffer")
    if store.put_from(KEY, address(cross_layer) + BLOCK * size, size):
        raise RuntimeError("the store could not store the block")
    block = cross_layer[BLOCK * size : (BLOCK + 1) * size].reshape(NUM_LAYERS, PAGE)
    for reader, as_laid_out in (("page by page, as it was put", True), ("K of all layers, then V", False)):
        places, lengths = pieces(buffers, as_laid_out)
        (answer,) = store.batch_get_into_multi_buffers([KEY], [places], [lengths])
        if answer != size:
            raise RuntimeError(
                f"the block could not be fetched: the store answered {answer}, but the block has {size} bytes"
            )
        right = sum(bool((buffer == page).all()) for buffer, page in zip(buffers, block, strict=True))
        rows.append(
            {"reader": reader, "answer": answer, "pieces": len(places), "right_pages": right, "pages": NUM_LAYERS}
        )
    stored_size = store.get_size(KEY)
    if stored_size != size:
        raise RuntimeError(f"the store answered that the block has {stored_size} bytes, but it has {size}")
    store.remove(KEY)
    store.close()
    return {"object_bytes": stored_size, "rows": rows}


def master() -> subprocess.Popen:
    """Start the store's master process on the loopback device. Return when the process accepts connections."""
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
    """Return the answers of the store and of the transfer engine.

    Raises:
        SystemExit: the master died too early. The message says how many readers had fetched the block.
    """
    rows, before = [], cross_layer.copy()
    try:
        found = {"store": stored(cross_layer, rows), "registration": registered(cross_layer)}
    except RuntimeError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(1)  # the sockets of a dead process close before the process counts as dead
        if server.returncode is None:
            raise
    if server.poll() is None:
        return found
    state = "is unchanged" if np.array_equal(cross_layer, before) else "has changed"
    raise SystemExit(
        f"the store's master (pid {server.pid}) died with exit code {server.returncode}. {len(rows)} of 2 readers had "
        f"fetched the block. The buffer from which the block was put {state}. Run the script again."
    )


def inside() -> None:
    """Run the measurement inside the namespace, and print JSON."""
    if not alone():
        raise RuntimeError("this network has other devices than loopback: start the script without --inside")
    loopback_up()
    cross_layer = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * NUM_LAYERS * PAGE, dtype=np.uint8)
    server = master()
    try:
        found = watched(server, cross_layer)
    finally:
        server.kill()  # the master stores nothing on disk, so it can be killed
        server.wait()
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    versions["mooncake"] = importlib.metadata.version("mooncake-transfer-engine-non-cuda")
    print(
        json.dumps({"engine": "Mooncake store and transfer engine, TCP over loopback", "versions": versions, **found})
    )


def main() -> int:
    """Check what is installed, run the measurement in a namespace, and return the exit status."""
    if importlib.util.find_spec("mooncake") is None:
        print(f"mooncake is not installed: python -m pip install {REQUIREMENT}", file=sys.stderr)
        return 2
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        print("the programs unshare and setpriv are missing: install the package util-linux", file=sys.stderr)
        return 2
    return in_a_namespace()


if __name__ == "__main__":
    if "--inside" in sys.argv:
        inside()
    else:
        sys.exit(main())
