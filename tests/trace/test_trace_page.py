"""The examples of docs/trace.md run, and print what the page shows."""

import re
from pathlib import Path

import pytest

from kvviz.trace.dye import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_an_example_prints_what_the_page_shows(number, capsys):
    code, shown = EXAMPLES[number]
    exec(code, {})
    assert len(EXAMPLES) == 2 and capsys.readouterr().out.endswith(shown)


def test_the_page_has_a_row_for_every_kind():
    assert [kind for kind in KINDS if f"| {kind} |" not in PAGE] == []
