"""The record of a run, the process of an engine, and every way in which it can fail. No engine is needed."""

import json
import os
import signal
import time

import pytest

from kvviz.bench import engine_run, layout_found
from kvviz.bench.engine_packages import EngineError
from kvviz.bench.engine_run import EngineSettings, failure_sentence
from kvviz.cache.layout import LAYOUTS
from kvviz.engine.scenarios import QUESTION
from tests.bench.fake_engine import RESULT, fake_record, views_text

SETTINGS = EngineSettings("0.25.1", "fp8_per_token_head", "prefer-cross-layer")


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Let the bench run a script of ours with this Python. Returns the function that sets the script."""
    import sys

    monkeypatch.setenv("KVVIZ_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "engines").mkdir(parents=True)
    for name, value in (("model_folder", tmp_path / "model"), ("engine_python", sys.executable)):
        monkeypatch.setattr(engine_run, name, lambda *given, value=value: value)
    monkeypatch.setattr(engine_run, "release_folder", lambda *given: tmp_path / "release")

    def script(text):
        (tmp_path / "inside.py").write_text(text)
        monkeypatch.setattr(engine_run, "INSIDE", tmp_path / "inside.py")

    return script


WRITES = """
import json, sys, os
from pathlib import Path
job = Path(sys.argv[1])
result, views = {result!r}, {views!r}
result["probe"] = {{**json.loads(job.read_text()), **dict(os.environ)}}
job.with_name("result.json").write_text(json.dumps(result))
job.with_name("views.json").write_text(views)
"""


def test_a_run_returns_the_record_and_leaves_nothing(engine, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "reader")
    monkeypatch.setenv("VLLM_PLUGINS", "reader")
    engine(WRITES.format(result=RESULT, views=views_text(SETTINGS)))
    record = engine_run.run(SETTINGS, lambda sentence: None)
    seen = record.probe
    assert seen["TRITON_INTERPRET"] == "1" and seen["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "VLLM_PLUGINS" not in seen and seen["PYTHONSAFEPATH"] == "1"
    assert seen["PYTHONPATH"] == str(tmp_path / "release")
    assert seen["prompt"] == QUESTION and seen["tokens"] == 6 and seen["layout"] == "NHD"
    assert seen["llm"]["kv_transfer_config"]["kv_connector"] == "PreferCrossLayer"
    assert not os.path.exists(seen["TMPDIR"])
    assert record.text == "The sky" and record.seconds["total"] >= 0
    assert not record.clean and record.kinds["collision"] == {"findings": 2, "first_byte": 64}
    assert json.loads(json.dumps(record.as_data()))["found"]["order"] == "BLKNHC"


def test_the_text_of_a_record_lists_every_replaced_part():
    text = str(fake_record(connector="prefer-cross-layer"))
    for words in ("vLLM 0.25.1", "BLKNHC (split, one buffer for all layers)", "'The sky'", "not clean: ",
                  "sampler: PyTorch", "total 7.5", "2.50, 0.25", "3.2 GB"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mode", ["fp8_per_token_head", "int4_per_token_head", "bfloat16"])
def test_every_layout_is_found_from_its_views_alone(name, mode):
    from kvviz.audit import collect
    from kvviz.cache.buffers import allocate
    from kvviz.cache.spec import CacheSpec

    spec = CacheSpec(4, 6, 16, 3, 64, mode)
    cache = allocate(spec, name, "meta")
    if spec.is_per_token_head:
        views = (*(view for view in cache.owners() if view.role == "data"), *cache.writers(cache.carve_scales()))
    else:
        views = collect.views_of({f"layer {number} KV": kv for number, kv in enumerate(cache.kv_caches)})
    found = layout_found.layout_of(views)
    assert (found.order, found.packing, found.cross_layer) == (
        LAYOUTS[name].order, LAYOUTS[name].packing, LAYOUTS[name].cross_layer,
    )  # fmt: skip
    assert (found.num_blocks, found.block_size, found.num_kv_heads, found.layers) == (6, 16, 3, 4)
    assert (found.cell_bytes, found.page_bytes) == (spec.cell_bytes, spec.page_size_bytes)


def test_views_of_something_else_are_refused():
    with pytest.raises(ValueError, match="the 0 views are not a KV cache"):
        layout_found.layout_of(())


def test_an_engine_that_fails_is_one_sentence_and_its_output_is_kept(engine, tmp_path):
    engine("raise RuntimeError('no layout fits')")
    with pytest.raises(
        engine_run.EngineFailedError, match=r"cannot run here \(RuntimeError: no layout fits\)"
    ) as caught:
        engine_run.run(SETTINGS, lambda sentence: None)
    assert caught.value.cause == "RuntimeError: no layout fits"
    assert "no layout fits" in (tmp_path / "cache" / "engines" / "last_failure.log").read_text()


def test_an_engine_that_never_ends_is_ended(engine):
    engine("import time\ntime.sleep(600)")
    started = time.monotonic()
    with pytest.raises(EngineError, match="did not end within 1 s and was ended: give a larger --seconds"):
        engine_run.run(SETTINGS, lambda sentence: None, seconds=1)
    assert time.monotonic() - started < 60


def test_an_interrupt_ends_the_engine(engine, monkeypatch, tmp_path):
    engine(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    real = engine_run.subprocess.Popen.wait

    def interrupted(process, timeout=None):
        if timeout is None:
            return real(process)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_run.subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine_run.run(SETTINGS, lambda sentence: None)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("release", "status", "said", "words"),
    [
        ("0.25.1", -signal.SIGKILL, "", "ended by signal 9, SIGKILL). Check that 6 GB of memory are free"),
        ("0.25.1", 1, "File x\nvllm.Sub.ValueError: bad\n  more\nlast", "(ValueError: bad more)"),
        (
            "0.24.0",
            1,
            "a.ValidationError: 1 error for C\ncache_dtype\n  Input should be 'a'\n    See",
            "C cache_dtype Input should",
        ),
        ("0.25.1", 3, "nothing to see", "(exit status 3)"),
        ("0.9.0", 1, "AttributeError: x", "tried with the releases 0.24.0"),
    ],
)
def test_the_sentence_about_a_failure(release, status, said, words, tmp_path):
    sentence = failure_sentence(EngineSettings(release), status, said, tmp_path / "log")
    assert words in sentence and "\n" not in sentence
