"""``kvviz compare``: its output, exit statuses, and the example in docs/compare.md."""

import json
import os
import re
from pathlib import Path

import pytest

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
    transfer, out = tmp_path / "t.json", tmp_path / "out.json"
    given = re.search(r"```json\n(.*?)```", text, re.S)[1]
    transfer.write_text(given)
    assert command.main(["compare", a, b, "--transfer", str(transfer)]) == 1
    assert capsys.readouterr().out == re.search(r"```text\n(.*?)```", text, re.S)[1]
    transfer.write_text(given.replace('"from_byte": 0', '"from_byte": 64'))
    assert command.main(["compare", a, b, "--transfer", str(transfer), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["counts"]["right"] == 256
    assert command.main(["compare", a, a]) == 0
    transfer.write_text('{"format": "other"}')
    assert command.main(["compare", a, b, "--transfer", str(transfer)]) == 2
    assert "must have the format 'kvviz-transfer' and the version 1" in capsys.readouterr().err
    assert command.main(["compare", a, b, "--json", a]) == 2
    assert "--json and an input are the same file" in capsys.readouterr().err
    assert "views" in Path(a).read_text()
    huge = written(tmp_path / "huge.json", 1 << 20, 4)
    assert command.main(["compare", huge, huge, "--json", str(out)]) == 3
    assert "not judged: the comparison would take" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pieces": 3}, "pieces must be a list, not 3"),
        ({"pieces": [{"sender": 0}]}, "pieces[0] has no field 'from'; add it"),
        ({"pieces": [{"sender": 0, "receiver": 0, "from": "K", "to": "L"}]}, "receiver 0 has no view of this name"),
        ({"pieces": [{"sender": 0, "receiver": 3, "from": "K", "to": "K"}]}, "receiver 3, but the transfer has 1"),
        ({"senders": [{"head": [0]}]}, "senders[0] has the unknown field 'head'"),
        (
            {"senders": [{"holds": {"head": [[0]]}}]},
            "must have integers, [start, stop] or [start, stop, step], not [0]",
        ),
        ({"senders": [{"blocks": [1.5]}]}, "senders[0].blocks must be an integer"),
        ({"version": True}, "and the version 1"),
        ({"senders": [{"file": None}]}, "senders[0].file must be the path of a views file, not None"),
        ({"pieces": [{"sender": 0, "receiver": 0, "from": "K", "to": "K", "from_block": 0}]}, "only one of from_block"),
        ({"senders": []}, "a transfer needs at least one sender"),
        ({"senders": [{"blocks": [[0, 3]]}]}, "must list blocks for the same number of tokens"),
        ({"senders": [{"blocks": [7]}]}, "sender 0 lists blocks 7 to 7, but it has 4 blocks"),
        ({"senders": [{"holds": {"head": [0]}}]}, "sender 0 holds 1 numbers of axis head, but K has 2"),
    ],
)
def test_bad_transfers_are_one_sentence(tmp_path, capsys, change, words):
    a, b = written(tmp_path / "a.json", 2, 4), written(tmp_path / "b.json", 1, 4)
    given = {"format": "kvviz-transfer", "version": 1, "senders": [{}], "receivers": [{}], "pieces": []} | change
    transfer = tmp_path / "t.json"
    transfer.write_text(json.dumps(given))
    assert command.main(["compare", a, b, "--transfer", str(transfer)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_file_that_the_transfer_names_is_not_overwritten(tmp_path, capsys):
    a, b = written(tmp_path / "a.json", 2, 4), written(tmp_path / "b.json", 2, 4)
    given = {"format": "kvviz-transfer", "version": 1, "senders": [{}], "receivers": [{"file": "b.json"}], "pieces": []}
    transfer = tmp_path / "t.json"
    transfer.write_text(json.dumps(given))
    assert command.main(["compare", a, a, "--transfer", str(transfer), "--json", b]) == 2
    assert "--json and an input are the same file" in capsys.readouterr().err and "views" in Path(b).read_text()
    os.mkfifo(tmp_path / "pipe")
    assert command.main(["compare", a, a, "--transfer", str(tmp_path / "pipe")]) == 2
    transfer.write_text('{"format": "kvviz-transfer", "format": "x"}')
    assert command.main(["compare", a, a, "--transfer", str(transfer)]) == 2
    assert "the field 'format' is given twice" in capsys.readouterr().err
