"""Sends dyed blocks through real transfer engines: python benchmarks/dyed_movers.py [--sound 100]

Each engine copies blocks of a small cache into another cache, first rightly and then with one fault at a time. The
faults are in the list of copies that the engine gets. The engine itself does what it is asked. The dye must name each
fault, and must not blame a sound transfer. The engines are:

* NIXL: one agent per cache. The second agent reads from the first one, through UCX on the loopback device.
* Mooncake: the blocks go into a store, and come back from it.

Each engine is used if it is installed. The constants REQUIREMENT of ``nixl_blocks.py`` and ``mooncake_store.py`` say
how to install them. The script runs in a network namespace of its own that has only the loopback device. It needs
Linux and util-linux. If no engine is installed, the exit status is 2. The output is JSON.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mooncake_store
import nixl_blocks
import numpy as np

from kvviz.cache.buffers import KVCache, allocate
from kvviz.cache.spec import CacheSpec
from kvviz.trace.dye import Dye, Move
from kvviz.trace.memory import Memory, memory_of

SPEC = CacheSpec(3, 8, 4, 2, 32, "int8_per_token_head")
LAYOUTS = {"prefill": "NHD", "decode": "cross-layer NHD", "other rank": "NHD"}
"""The layout of the cache of each process."""
BLOCKS = {3: 6, 1: 2}
FAULTS = {
    "one page short": {"stale"},
    "one block id off": {"permuted", "stale"},
    "scales left behind": {"stale"},
    "K and V swapped": {"permuted"},
    "another rank's shard": {"foreign"},
    "half of a cell": {"truncated"},
    "one block twice": {"duplicated"},
}
"""For each fault, the kinds that name it."""
SECONDS = 30.0
"""The most seconds of one transfer."""

Copies = list[tuple[int, int, int]]
"""Copies as (address of the source, address of the target, bytes)."""
Mover = Callable[[Copies], None]
Sender = Callable[[dict[int, int], str], Callable[[int], object]]
"""From blocks and a fault, it makes the function that the dye calls in each pass."""


def caches(layouts: dict[str, str]) -> tuple[dict[str, KVCache], dict[str, Memory]]:
    """Allocate the cache of each process. Return the caches and their memories."""
    made = {name: allocate(SPEC, layout) for name, layout in layouts.items()}
    return made, {name: memory_of(one.owners(), one.storages_by_name()) for name, one in made.items()}


def cells(memory: Memory, block: int) -> Iterator[tuple[str, int, int]]:
    """Yield view, address and bytes of each data cell and each scale of a block."""
    for view in memory.views:
        length = SPEC.data_bytes if view.role == "data" else SPEC.scale_bytes
        for token, head in np.ndindex(SPEC.block_size, SPEC.num_kv_heads):
            index = (block, token, head, 0)[: len(view.shape)]
            yield view.name, memory.flats[view.storage.name].data_ptr() + view.start_of(index), length


def copies(memories: dict[str, Memory], blocks: dict[int, int], fault: str = "") -> Copies:
    """Return the copies that move blocks from ``prefill`` to ``decode``, rightly or with one fault."""
    first = next(iter(blocks))
    found = []
    for source, target in blocks.items():
        wrong = source == first
        here = "other rank" if fault == "another rank's shard" else "prefill"
        goal = (target + 1) % SPEC.num_blocks if fault == "one block id off" and wrong else target
        taken = first if fault == "one block twice" else source
        places: dict[str, list[tuple[int, int]]] = {}
        for name, at, length in cells(memories[here], taken):
            places.setdefault(name, []).append((at, length))
        numbers = dict.fromkeys(places, 0)
        for name, at, length in cells(memories["decode"], goal):
            origin = name.translate(str.maketrans("KV", "VK")) if fault == "K and V swapped" else name
            begin, _ = places[origin][numbers[name]]
            numbers[name] += 1
            if fault == "one page short" and wrong and name.startswith(f"layer {SPEC.num_layers - 1} "):
                continue
            if fault == "scales left behind" and name.endswith("scale"):
                continue
            half = fault == "half of a cell" and wrong and name.endswith("data")
            found.append((begin, at, length // 2 if half else length))
    return found


@contextmanager
def nixl(memories: dict[str, Memory]) -> Iterator[Mover]:
    """Yield a mover: an agent for ``decode`` that reads from an agent for all other caches."""
    from nixl import nixl_agent

    sides = {name: nixl_agent(name) for name in ("sender", "receiver")}
    regions = []
    for name, memory in memories.items():
        agent = sides["receiver" if name == "decode" else "sender"]
        regions += [(agent, nixl_blocks.registered(agent, flat.numpy())) for flat in memory.flats.values()]
    reader = sides["receiver"]
    name = reader.add_remote_agent(sides["sender"].get_agent_metadata())
    name = name.decode() if isinstance(name, bytes) else name

    def move(wanted: Copies) -> None:
        there = reader.get_xfer_descs([(source, length, 0) for source, _, length in wanted], "DRAM")
        here = reader.get_xfer_descs([(target, length, 0) for _, target, length in wanted], "DRAM")
        handle = reader.initialize_xfer("READ", here, there, name)
        state, begin = reader.transfer(handle), time.perf_counter()
        while state == "PROC":
            if time.perf_counter() - begin > SECONDS:
                raise TimeoutError(f"NIXL did not end a transfer of {len(wanted)} descriptors within {SECONDS:.0f} s")
            state = reader.check_xfer_state(handle)
        reader.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer of NIXL ended in state {state}")

    yield move
    for agent, region in regions:
        agent.deregister_memory(region)


@contextmanager
def mooncake(memories: dict[str, Memory]) -> Iterator[Mover]:
    """Yield a mover: it puts all sources into one object of the store, and gets the targets from this object."""
    server = mooncake_store.master()
    try:
        from mooncake.store import MooncakeDistributedStore

        store, address = MooncakeDistributedStore(), f"127.0.0.1:{mooncake_store.RPC}"
        if store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", address):
            raise RuntimeError("the Mooncake store did not start")
        for flat in (flat for memory in memories.values() for flat in memory.flats.values()):
            if store.register_buffer(flat.data_ptr(), flat.numel()):
                raise RuntimeError("the Mooncake store could not register a cache")
        count = iter(range(1 << 30))

        def move(wanted: Copies) -> None:
            key, total = f"blocks {next(count)}", sum(length for _, _, length in wanted)
            sources, targets, lengths = (list(part) for part in zip(*wanted, strict=True))
            (put,) = store.batch_put_from_multi_buffers([key], [sources], [lengths])
            (got,) = store.batch_get_into_multi_buffers([key], [targets], [lengths])
            if (put, got) != (0, total):
                raise RuntimeError(f"the Mooncake store answered {put} to a put, and {got} to a get of {total} bytes")

        yield move
        store.close()
    finally:
        server.kill()  # the master stores nothing on disk, so it can be killed
        server.wait()


ENGINES = {"nixl": nixl, "mooncake": mooncake}


def rows(memories: dict[str, Memory], sender: Sender, sound: int) -> dict:
    """Send sound transfers and one transfer per fault. Return the rows of an engine."""
    dyed, lot = Dye(memories), np.random.default_rng(0)

    def send(blocks: dict[int, int], fault: str = ""):
        return dyed.carry(sender(blocks, fault), "decode", [Move("prefill", blocks)], limit_s=4 * SECONDS)

    begin, alarms = time.perf_counter(), 0
    for _ in range(sound):
        count = int(lot.integers(1, SPEC.num_blocks))
        pairs = (lot.permutation(SPEC.num_blocks)[:count].tolist() for _ in range(2))
        alarms += not send(dict(zip(*pairs, strict=True))).clean
    seconds = time.perf_counter() - begin
    found = []
    for fault, kinds in FAULTS.items():
        arrival = send(BLOCKS, fault)
        named = {one.kind for one in arrival.groups}
        row = {"fault": fault, "named": named == kinds, "cells": sum(one.cells for one in arrival.groups)}
        found.append(row | {"kinds": sorted(named), "first": str(arrival.groups[0]), "seconds": arrival.seconds})
    return {"sound": sound, "false_alarms": alarms, "sound_seconds": seconds, "faults": found}


def by_copies(memories: dict[str, Memory], move: Mover) -> Sender:
    """Return the sender of an engine that gets a list of copies."""

    def sender(blocks: dict[int, int], fault: str) -> Callable[[int], object]:
        wanted = copies(memories, blocks, fault)
        return lambda number: move(wanted)

    return sender


def installed() -> list[str]:
    """Return the names of the engines that are installed."""
    return [name for name in ENGINES if importlib.util.find_spec(name)]


def inside(sound: int) -> None:
    """Run all engines inside the namespace, and print JSON."""
    mooncake_store.loopback_up()
    os.environ.update(nixl_blocks.ENVIRONMENT)
    result = {}
    for name in installed():
        _, memories = caches(LAYOUTS)
        with ENGINES[name](memories) as move:
            result[name] = rows(memories, by_copies(memories, move), sound)
    print(json.dumps(result))


def main() -> int:
    """Check what is installed, run the engines in a namespace, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sound", type=int, default=100, help="number of sound transfers per engine")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given.sound)
        return 0
    if not installed():
        needed = " or ".join(part.REQUIREMENT for part in (nixl_blocks, mooncake_store))
        print(f"neither nixl nor mooncake is installed: python -m pip install {needed}", file=sys.stderr)
        return 2
    longest = mooncake_store.LONGEST + given.sound
    return mooncake_store.in_a_namespace(__file__, f"--sound={given.sound}", longest=longest)


if __name__ == "__main__":
    sys.exit(main())
