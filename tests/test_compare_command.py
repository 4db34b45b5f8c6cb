"""``kvviz compare``: its output, exit statuses, and the example in docs/compare.md."""

import json
import re
from pathlib import Path

from kvviz import __main__ as command

DOCS = Path(command.__file__).parents[1] / "docs" / "compare.md"


def written(path, heads, blocks):
    view = {"name": "K", "storage": "s", "dtype": "uint8", "shape": [blocks, 4, heads, 16],
            "stride": [64 * heads, 16, 64, 1], "axes": ["block", "token", "head", "byte"]}  # fmt: skip
    storage = {"name": "s", "nbytes": 64 * heads * blocks}
    path.write_text(json.dumps({"format": "kvviz-views", "version": 1, "storages": [storage], "views": [view]}))
    return str(path)


def test_example_and_statuses(tmp_path, capsys):
    a, b = written(tmp_path / "a.json", 2, 4), written(tmp_path / "b.json", 1, 8)
    text = DOCS.read_text()
    transfer = tmp_path / "t.json"
    given = re.search(r"```json\n(.*?)```", text, re.S)[1]
    transfer.write_text(given)
    assert command.main(["compare", a, b, "--transfer", str(transfer)]) == 1
    assert capsys.readouterr().out == re.search(r"```text\n(.*?)```", text, re.S)[1]
    transfer.write_text(given.replace('"from_byte": 0', '"from_byte": 64'))
    assert command.main(["compare", a, b, "--transfer", str(transfer), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["right"] == 256
    assert command.main(["compare", a, a]) == 0
    transfer.write_text('{"format": "other"}')
    assert command.main(["compare", a, b, "--transfer", str(transfer)]) == 2
    assert capsys.readouterr().err.startswith("kvviz compare: the transfer breaks its format")
