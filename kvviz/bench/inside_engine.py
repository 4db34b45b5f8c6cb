"""Runs one released vLLM engine, and writes what it did: result.json and views.json. Runs in the engine's environment.

``python inside_engine.py job.json`` reads the job that ``kvviz.bench.run`` wrote. This file imports nothing of
kvviz, except the files beside it and the writer of views files, which needs the standard library only.
"""

import ast
import ctypes
import importlib.metadata
import importlib.util
import json
import resource
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PR_SET_PDEATHSIG = 1
"""Linux's number of the request that ends this process when the process that started it is killed."""


def load_file(name, path, **named):
    """Import one file as a module, without its package."""
    found = importlib.util.spec_from_file_location(name, path, **named)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def main(job_path):
    """Run the job, and write result.json and views.json beside the job."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    job, started = json.loads(Path(job_path).read_text()), time.monotonic()
    stand_ins = load_file("stand_ins", HERE / "stand_ins.py")
    parts = stand_ins.place_early()
    import vllm

    parts += stand_ins.place()
    load_file("preferring_connector", HERE / "preferring_connector.py")
    seconds = {"import": since(started)}
    connector_names_layout = stand_ins.choose_layout(job["layout"], "kv_transfer_config" in job["llm"])
    started = time.monotonic()
    llm = make(vllm, job["llm"])
    seconds["load"] = since(started)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    layers = runner.vllm_config.compilation_config.static_forward_context
    started = time.monotonic()
    answer, probed = asked(llm, layers, job)
    seconds["generate"] = since(started)
    write_views(job, layers)
    result = {
        "version": vllm.__version__, "replaced": parts, "seconds": seconds, **answer, "probe": probed,
        "engine_layout": engine_layout(runner.vllm_config), "layout_names": layout_names(vllm),
        "connector_names_layout": connector_names_layout, "connectors": connector_hooks(),
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "backend": sorted({type(layer.impl).__name__ for layer in layers.values() if hasattr(layer, "impl")}),
        "packages": {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers", "numpy")},
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip
    Path(job_path).with_name("result.json").write_text(json.dumps(result))


def since(started):
    """Return the seconds since ``started``, on the clock time.monotonic."""
    return round(time.monotonic() - started, 1)


def make(vllm, arguments):
    """Return the engine."""
    given = dict(arguments)
    if "kv_transfer_config" in given:
        from vllm.config import KVTransferConfig

        given["kv_transfer_config"] = KVTransferConfig(**given["kv_transfer_config"])
    return vllm.LLM(**given)


def asked(llm, layers, job):
    """Let the engine answer the prompt. Return the answer as a dict, and what the probe returned, or None."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], logprobs=2)
    outputs = []

    def generate():
        outputs.append(llm.chat([{"role": "user", "content": job["prompt"]}], sampling, use_tqdm=False)[0])
        return outputs[-1].outputs[0].text

    if job["probe"]:
        package = Path(job["kvviz"])
        load_file("kvviz", package / "__init__.py", submodule_search_locations=[str(package)])
        probed = load_file("kvviz_probe", job["probe"]).probe(generate, layers)
    else:
        probed = None
    if not outputs:
        generate()
    found = outputs[-1].outputs[0]
    return {
        "prompt_token_ids": list(outputs[-1].prompt_token_ids),
        "text": found.text,
        "token_ids": list(found.token_ids),
        "margins": [margin(step) for step in found.logprobs or []],
    }, probed


def margin(candidates):
    """Return the distance of the two most likely tokens, as a difference of natural logarithms."""
    best = sorted((one.logprob for one in candidates.values()), reverse=True)[:2]
    return round(best[0] - best[1], 4)


def write_views(job, layers):
    """Write the views of the live tensors beside the job."""
    writer = load_file("kvviz_writer", job["writer"])
    writer.write_views(job["views"], writer.tensors_of_vllm(layers))


def engine_layout(vllm_config):
    """Return the engine's own name of the layout that it chose."""
    named = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    if named is None:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        named = get_kv_cache_layout()
    return str(named)


def layout_names(vllm):
    """Return the layout names that the engine accepts. They stand in the type of a variable in vllm/envs.py."""
    tree = ast.parse((Path(vllm.__file__).parent / "envs.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "VLLM_KV_CACHE_LAYOUT":
            texts = (part.value for part in ast.walk(node.annotation) if isinstance(part, ast.Constant))
            return [text for text in texts if isinstance(text, str)]
    return []


def connector_hooks():
    """Return which questions about layouts vLLM asks a connector, and which connectors answer them with code.

    ``{"base": [names], "Connector": [names] or a text that says why the connector could not be imported}``
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    hooks = sorted(name for name in dir(KVConnectorBase_V1) if "layout" in name or "cross_layer" in name)
    found = {"base": hooks}
    for name, load in sorted(KVConnectorFactory._registry.items()):
        try:
            own = [part for part in load().__mro__ if part is not KVConnectorBase_V1]
            found[name] = [hook for hook in hooks if any(hook in vars(part) for part in own)]
        except Exception as error:  # many connectors need packages that are not installed
            found[name] = f"cannot be imported: {type(error).__name__}"
    return found


if __name__ == "__main__":
    main(sys.argv[1])
