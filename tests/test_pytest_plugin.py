"""The pytest plugin and the GitHub Action: the examples of docs/pytest.md pass, and fail with the text of the page."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml

import kvviz
from kvviz.audit.claims import Covers
from kvviz.pytest_plugin import Layout, assert_layout

ROOT = Path(kvviz.__file__).parents[1]
PAGE = (ROOT / "docs" / "pytest.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```.*?```diff\n(.*?)```.*?```text\n(.*?)```", PAGE, re.S)


@pytest.fixture
def project(tmp_path):
    """An empty project in an environment where kvviz is installed: pytest finds the plugin by its entry point."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]["pytest11"]
    info = tmp_path / "site" / "kvviz_for_this_test-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvviz-for-this-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[pytest11]\n" + "".join(f"{k} = {v}\n" for k, v in entry.items()))
    folder = tmp_path / "project"
    folder.mkdir()

    def run(source):
        (folder / "test_it.py").write_text(source, encoding="utf-8")
        path = os.pathsep.join([str(info.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": "", "COLUMNS": "120"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)

    return run


def changed(source, diff):
    """Apply the diff of an example: its lines have one place each."""
    before = "".join(line[1:] + "\n" for line in diff.splitlines() if line.startswith("-"))
    after = "".join(line[1:] + "\n" for line in diff.splitlines() if line.startswith("+"))
    assert source.count(before) == 1
    return source.replace(before, after)


@pytest.mark.parametrize(("source", "diff", "text"), EXAMPLES, ids=["vllm", "lmcache", "sglang"])
def test_examples_of_the_page(project, source, diff, text):
    passed = project(source)
    assert passed.returncode == 0, passed.stdout
    failed = project(changed(source, diff))
    assert failed.returncode == 1 and "1 failed" in failed.stdout
    shown = [line.removeprefix("E").strip() for line in failed.stdout.splitlines()]
    for line in text.splitlines():
        assert any(line.strip() in other for other in shown), f"{line!r} is not in\n{failed.stdout}"
    assert "pytest_plugin.py" not in failed.stdout


def test_a_larger_pool_cannot_be_addressed(project):
    failed = project(EXAMPLES[2][0].replace("1 << 20", "1 << 22"))
    assert failed.returncode == 1 and "int32 is too narrow" in failed.stdout


def cells(layers=2):
    buffer = np.zeros((4, layers, 8), np.uint8)
    return {f"layer {n} data": buffer[:, n, :6] for n in range(layers)}


def test_layout_by_hand():
    layout = Layout()
    assert layout.checked
    layout.add(cells(), axes=("block", "byte"))
    assert not layout.checked and layout.check().clean and layout.checked
    with pytest.raises(ValueError, match="'layer 0 data' was added before"):
        layout.add(cells())
    buffer = cells()["layer 0 data"]
    layout = Layout()
    layout.add({"X data": buffer, "taken": buffer[:, :3]}, axes=("block", "byte"))
    with pytest.raises(AssertionError, match=r"collision: X data, taken(.|\n)*block 0, byte 0"):
        layout.check()
    layout = Layout()
    layout.add({"X data": buffer})
    layout.add({"taken": buffer[:, :3]}, overlap=True)
    assert layout.check().clean
    layout.claim(Covers("taken", ("X data",)))
    with pytest.raises(AssertionError, match="bytes of the content are left out"):
        layout.check()


def test_assert_layout_of_views_and_files(tmp_path):
    with pytest.raises(AssertionError, match="the cache has no views"):
        assert_layout({})
    views = [{"name": name, "storage": "s", "shape": [4], "stride": [1], "dtype": "uint8"} for name in "ab"]
    file = {"format": "kvviz-views", "version": 1, "storages": [{"name": "s", "nbytes": 4}], "views": views}
    path = tmp_path / "views.json"
    path.write_text(json.dumps(file))
    assert assert_layout(path).clean  # the file claims nothing
    path.write_text(json.dumps(file | {"claims": [{"kind": "disjoint", "views": ["a", "b"]}]}))
    with pytest.raises(AssertionError, match="not clean"):
        assert_layout(str(path))
    assert assert_layout(path, []).clean


def test_a_test_that_fails_for_another_reason_fails_once(project):
    failed = project("def test_it(layout):\n    layout.add({'a': 3})\n    assert False, 'of its own'\n")
    assert "of its own" in failed.stdout and "torch tensors and numpy" not in failed.stdout


@pytest.mark.parametrize(
    "source",
    [
        """
import unittest
import numpy as np
import pytest

class TestCache(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def keep(self, layout):
        self.layout = layout

    def test_it(self):
        buffer = np.zeros(16, np.uint8)
        self.layout.add({"a": buffer[0:8], "b": buffer[4:12]})
""",
        """
import numpy as np

def test_it(request):
    buffer = np.zeros(16, np.uint8)
    request.getfixturevalue("layout").add({"a": buffer[0:8], "b": buffer[4:12]})
""",
        """
import numpy as np
import pytest

@pytest.fixture
def late(layout):
    yield
    buffer = np.zeros(16, np.uint8)
    layout.add({"a": buffer[0:8], "b": buffer[4:12]})

def test_it(late):
    pass
""",
    ],
    ids=["unittest", "asked for", "after the test"],
)
def test_a_layout_is_checked_wherever_it_comes_from(project, source):
    done = project(source)
    assert done.returncode == 1 and "not clean" in done.stdout


def test_a_finding_is_an_assertion_error(project):
    source = """
import numpy as np
import pytest

@pytest.mark.xfail(raises=AssertionError, strict=True)
def test_it(layout):
    buffer = np.zeros(16, np.uint8)
    layout.add({"a": buffer[0:8], "b": buffer[4:12]})
"""
    done = project(source)
    assert done.returncode == 0 and "1 xfailed" in done.stdout


def action(tmp_path, files):
    """Run the audit step of action.yml as GitHub does. Return its exit status, its output and the summary."""
    steps = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"]
    (step,) = (step for step in steps if step["name"] == "Audit")
    assert step["env"] == {"FILES": "${{ inputs.files }}"} and step["shell"] == "bash"
    (tmp_path / "bin").mkdir(exist_ok=True)
    command = tmp_path / "bin" / "kvviz"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvviz "$@"\n')
    command.chmod(0o755)
    summary = tmp_path / "summary.md"
    summary.write_text("")
    environment = os.environ | {"FILES": files, "GITHUB_STEP_SUMMARY": str(summary), "PYTHONPATH": str(ROOT),
                                "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}  # fmt: skip
    script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, summary.read_text()


def test_action(tmp_path):
    view = {"name": "a", "storage": "s", "shape": [4], "stride": [1], "dtype": "uint8"}
    for name, nbytes in (("clean", 4), ("broken", 3)):
        file = {"format": "kvviz-views", "version": 1, "storages": [{"name": "s", "nbytes": nbytes}], "views": [view]}
        (tmp_path / f"{name}.json").write_text(json.dumps(file))
    (tmp_path / "other.json").write_text("{")
    status, output, summary = action(tmp_path, "clean.json")
    assert status == 0 and "### clean.json" in summary and "clean: " in summary and "clean: " in output
    status, _, summary = action(tmp_path, "[bc]*.json")
    assert status == 1 and summary.index("### broken.json") < summary.index("### clean.json")
    assert "out_of_bounds" in summary
    assert action(tmp_path, "clean.json other.json")[0] == 2
    status, output, summary = action(tmp_path, "none*.json")
    assert status == 2 and "no file matches none*.json" in output and "no file matches" in summary
    status, output, summary = action(tmp_path, "clean.json miss*.json")
    assert status == 2 and "no file matches miss*.json" in summary and "### clean.json" in summary
    assert action(tmp_path, " ")[0] == 2


def test_action_installs_kvviz():
    steps = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"]
    assert steps[0]["run"] == 'python3 -m pip install --quiet "${{ github.action_path }}"'
