"""Tests of benchmarks/dyed_movers.py: its faults have their kinds, and its engines run where they are installed."""

import ctypes
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvviz.bench.engine_packages import not_installed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def dyed_movers():
    sys.path.insert(0, str(BENCHMARKS))
    import dyed_movers

    sys.path.remove(str(BENCHMARKS))
    return dyed_movers


def memmove(wanted):
    for source, target, length in wanted:
        ctypes.memmove(target, source, length)


def test_plain_copies_are_clean_and_each_fault_is_named(dyed_movers):
    _, memories = dyed_movers.caches(dyed_movers.LAYOUTS)
    found = dyed_movers.rows(memories, dyed_movers.by_copies(memories, memmove), sound=5)
    assert (found["sound"], found["false_alarms"]) == (5, 0)
    assert [(row["fault"], row["named"]) for row in found["faults"]] == [(fault, True) for fault in dyed_movers.FAULTS]


def test_an_engine_that_does_nothing_is_not_clean(dyed_movers):
    _, memories = dyed_movers.caches(dyed_movers.LAYOUTS)
    found = dyed_movers.rows(memories, lambda blocks, fault: lambda number: None, sound=2)
    assert found["false_alarms"] == 2 and not any(row["named"] for row in found["faults"] if row["kinds"] != ["stale"])


def test_without_engines_the_script_says_what_to_install(dyed_movers, monkeypatch, capsys):
    monkeypatch.setattr(dyed_movers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["dyed_movers.py"])
    assert dyed_movers.main() == 2
    assert "neither nixl nor mooncake is installed: python -m pip install" in capsys.readouterr().err


@pytest.mark.slow
def test_the_engines_that_are_installed_are_judged():
    names = [name for name in ("nixl", "mooncake") if importlib.util.find_spec(name)]
    if not names:
        pytest.skip("neither nixl nor mooncake is installed")
    command = [sys.executable, BENCHMARKS / "dyed_movers.py", "--sound", "5"]
    done = subprocess.run(command, capture_output=True, timeout=200, text=True)
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout).values():
        assert not found["false_alarms"] and all(row["named"] for row in found["faults"])


@pytest.mark.slow
def test_the_connector_of_a_released_engine_is_judged():
    if missing := not_installed("0.32.0"):
        pytest.skip(missing)
    command = [sys.executable, BENCHMARKS / "dyed_connector.py", "--sound", "5"]
    done = subprocess.run(command, capture_output=True, timeout=300, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["false_alarms"] and all(row["named"] for row in found["faults"])
