"""Sends dyed blocks through the example connector of a released vLLM: python benchmarks/dyed_connector.py [--sound 100]

The connector stores the blocks of each layer in a file, and loads them into other blocks of another cache. Its code is
the code of the release. Only its constructor is left out, because the constructor needs a whole engine. Each fault is
in the block ids or in the tensors that the connector gets.

The script needs the packages of ``kvviz engine vllm --release 0.32.0``. If they are missing, the exit status is 2. The
last line of the output is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import dyed_movers

from kvviz.bench.engine_packages import engine_python, not_installed, release_folder
from kvviz.cache.buffers import KVCache

RELEASE = "0.32.0"
LAYOUTS = {"prefill": "LBNHC", "decode": "BLNHC", "other rank": "LBNHC"}
"""The layout of the cache of each process. The connector needs tensors of shape (block, head, token, content)."""
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def layers(cache: KVCache, fault: str, receives: bool) -> dict[str, object]:
    """Return the tensors that the connector gets, by name: K and V of each layer, or parts of them."""
    data, found = dyed_movers.SPEC.data_bytes, {}
    for layer, kv in enumerate(cache.kv_caches):
        if receives and fault == "one page short" and layer == len(cache.kv_caches) - 1:
            continue
        for half, cells in zip("KV", kv.chunk(2, -1), strict=True):
            name = {"K": "V", "V": "K"}[half] if receives and fault == "K and V swapped" else half
            if fault == "scales left behind":
                found[f"{layer} {name}"] = cells[..., :data]
            elif fault == "half of a cell":
                found[f"{layer} {name}"] = cells[..., : data // 2]
                found[f"{layer} {name} scale"] = cells[..., data:]
            else:
                found[f"{layer} {name}"] = cells
    return found


def inside(sound: int) -> None:
    """Run in the Python of the engine: carry dyed blocks through the connector, and print JSON."""
    sys.path.remove(str(Path(__file__).parent))  # vLLM imports a package kernels, and here is a file kernels.py
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector as released

    held, memories = dyed_movers.caches(LAYOUTS)
    size = dyed_movers.SPEC.block_size
    connector = released.ExampleConnector.__new__(released.ExampleConnector)
    connector._block_size = size

    def bind(blocks: list[int], is_store: bool) -> None:
        metadata = released.ExampleConnectorMetadata()
        tokens = list(range(len(blocks) * size + 1))  # the connector stores whole blocks before the last token
        metadata.add_request(tokens, [*blocks, 0], size, is_store, [])
        connector.bind_connector_metadata(metadata)

    def sender(blocks: dict[int, int], fault: str):
        here, there = list(blocks), list(blocks.values())
        if fault == "one block id off":
            there[0] = (there[0] + 1) % dyed_movers.SPEC.num_blocks
        if fault == "one block twice":
            here = [here[0]] * len(here)
        source = held["other rank" if fault == "another rank's shard" else "prefill"]

        def move(number: int) -> None:
            with tempfile.TemporaryDirectory() as folder:
                connector._storage_path = folder
                bind(here, True)
                for name, tensor in layers(source, fault, False).items():
                    connector.save_kv_layer(name, tensor, None)
                bind(there, False)
                targets = layers(held["decode"], fault, True)
                context = {name: SimpleNamespace(kv_cache=tensor) for name, tensor in targets.items()}
                connector.start_load_kv(
                    SimpleNamespace(attn_metadata=dict.fromkeys(targets), no_compile_layers=context)
                )

        return move

    print(json.dumps({"release": RELEASE} | dyed_movers.rows(memories, sender, sound)))


def main() -> int:
    """Run the script again in the Python of the engine, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sound", type=int, default=100, help="number of sound transfers")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given.sound)
        return 0
    if missing := not_installed(RELEASE):
        print(missing, file=sys.stderr)
        return 2
    paths = [str(release_folder(RELEASE)), str(Path(__file__).parents[1])]
    command = [str(engine_python()), __file__, "--inside", f"--sound={given.sound}"]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
