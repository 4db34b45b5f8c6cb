"""The stand-ins compute what the C++ helpers of vLLM compute. They are tested with torch alone, without vLLM."""

import ast
from pathlib import Path

import pytest
import torch

from kvviz.bench import inside_engine, stand_ins

BENCH = Path(stand_ins.__file__).parent


def test_a_slot_is_the_block_times_its_size_plus_the_place_in_the_block():
    table = torch.tensor([[7, 3], [5, 9]], dtype=torch.int32)
    positions, starts = torch.tensor([0, 3, 4, 5, 2, 6]), torch.tensor([0, 4, 6])
    slots = torch.full((8,), -1)
    stand_ins.slot_mapping(starts, positions, table, slots, 4)
    assert slots.tolist() == [28, 31, 12, 13, 22, 38, -1, -1]


def test_a_gated_helper_multiplies_the_halves():
    x, out = torch.randn(3, 10), torch.empty(3, 5)
    stand_ins.gated(torch.nn.functional.silu)(out, x)
    expected = x[:, :5] / (1 + (-x[:, :5]).exp()) * x[:, 5:]
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", ["inside_engine.py", "stand_ins.py", "preferring_connector.py"])
def test_files_of_the_engine_process_import_nothing_of_kvviz(name):
    tree = ast.parse((BENCH / name).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {one for one in imported if one.startswith("kvviz")}


class Logprob:
    def __init__(self, logprob):
        self.logprob = logprob


def test_a_margin_is_the_distance_of_the_two_best():
    assert inside_engine.margin({5: Logprob(-0.25), 9: Logprob(-3.0), 1: Logprob(-2.5)}) == 2.25


@pytest.mark.parametrize(
    ("annotation", "names"),
    [('Literal["NHD", "HND"] | None', ["NHD", "HND"]), ('(Literal["LBNHC", "NHD"] | None)', ["LBNHC", "NHD"])],
)
def test_layout_names_are_read_from_the_type_of_the_variable(tmp_path, annotation, names):
    (tmp_path / "envs.py").write_text(
        f"if True:\n    OTHER: str = 'x'\n    VLLM_KV_CACHE_LAYOUT: {annotation} = None\n"
    )

    class Module:
        __file__ = str(tmp_path / "__init__.py")

    assert inside_engine.layout_names(Module) == names
