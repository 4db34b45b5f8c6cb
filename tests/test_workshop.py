"""Tests of the exercises: solutions pass their checks, holes and likely mistakes do not, and both copies are right."""

import ast
import inspect
import linecache
import os
import re
import shutil
import symtable
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from kvviz.report.notebook import Notebook, execute, read
from kvviz.report.page import Frame, render_page
from kvviz.report.workshop import hole, instructor, main, participants, solved, tagged
from kvviz.show.exercise import WrongAnswerError
from tests.test_notebooks import CELL_TIMEOUT_S, FOLDER, NOTEBOOKS

EXERCISES = [path for path in NOTEBOOKS if path.stem[:2] != "11"]
"""All notebooks but the challenge. The challenge has no holes: its answers are drawn at random, like its caches."""
WITH_MODEL = {"03", "04"}
"""Numbers of the notebooks whose exercises need the language model."""
MARKED = re.compile(r"^([ \t]*)# solution\n.*?# end of solution$", re.MULTILINE | re.DOTALL)
EVERY = pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem[:2])

SLIPS = {
    "00.1": [
        ("scale_bytes = (176, 196)", "byte 176 belongs to layer 1 K scale [block 0, token 0, head 0]"),
        ("scale_bytes = (196, 199)", "3 bytes"),
        ("scale_bytes = (640, 644)", "is no range of bytes on these two pages"),
    ],
    "01.1": [
        ("return (token * 2 + head) * spec.cell_bytes", "block 0, token 0, head 0: byte 0 belongs to layer 0 K data"),
        (
            "return 160 + token * spec.cell_bytes",
            "block 0, token 0, head 1: byte 160 belongs to layer 0 V data [block 0, t",
        ),
        ("return 160 + (token + 4 * head) * spec.cell_bytes", "block 0, token 0, head 1: byte 240"),
        ("return 10**6", "no cell fits at byte 1000000"),
        ("return 'V'", "v_start(0, 0) must be a whole number, but it is 'V' (str)"),
    ],
    "02.1": [
        ("misplaced_layers = [0, 1, 2, 3]", "layer 0: block 0, token 0, head 0"),
        ("misplaced_layers = [1]", "at least one layer is missing"),
    ],
    "02.2": [
        ("return steps_bytes, start_bytes", "NHD: misplaced, layer 0 K scale [block 0, token 0, head 0] at bytes"),
        (
            "return tuple(step // 4 for step in steps_bytes), start_bytes // 4",
            "NHD: misplaced, layer 0 K scale [block 0",
        ),
        ("return (40, 10, 5), start_bytes // 4 + 4", "HND: "),
    ],
    "03.1": [
        (
            "return 4 * block * page_bytes + (2 * token + head) * cell_bytes + data_bytes",
            "layer 0 K scale [block 1, tok",
        ),
        ("return layer * page_bytes + (2 * token + head) * cell_bytes + data_bytes", "layer 0 K scale [block 1, token"),
        ("return 10**6", "layer 0, block 0, token 0, head 0: the buffer has no byte 1000000"),
    ],
    "03.2": [("first_wrong = 1", "token 1 is"), ("first_wrong = 0", "token 0 is")],
    "04.1": [
        ("return 'scale on data'", "does not confirm 'scale on data'"),
        ("return 'scale on scale' if first_wrong_token else 'scale on data'", "does not confirm 'scale on data'"),
        ("return 'the tail'", "must be one of scale on scale, scale on data, cannot tell"),
    ],
    "05.1": [
        (
            "altitude = dict(pairs='kernel launcher', memory='allocator', slots='caller')",
            "pairs: not at the kernel laun",
        ),
        (
            "altitude = dict(pairs='GPU', memory='allocator', slots='caller')",
            "pairs must be one of caller",
        ),
    ],
    "06.1": [
        ("return 'ours'", "build 1 has the wrong verdict: 'ours' ignores column 'step': 'start agent'"),
        (
            "return 'infrastructure' if build['step'] != 'tests' else 'ours'",
            "build 3 has the wrong verdict: 'ours' ignores",
        ),
    ],
    "07.1": [
        ("return True", "a fault passes: the layer's own offset forgotten. block 0, token 0, head 0: data end at byte"),
        (
            "return scale['start'] == data['start'] + data_bytes",
            "a fault passes: tokens and heads swapped. block 0, to",
        ),
        (
            "return data['steps'] == scale['steps'] and scale['start'] == data['start'] + data_bytes",
            "a correct cache is refused: one head",
        ),
    ],
    "08.1": [
        ("width_bytes = 2 * 16 * 3 * 64", "this counts one byte per element"),
        (
            "width_bytes = 2 * 16 * 3 * 32",
            "byte 3072 is the first that is not copied. It belongs to layer 0 V data [block 0, token 12, head 1]: th",
        ),
        (
            "width_bytes = 3455",
            "byte 3455 is the first that is not copied. It belongs to layer 0 V scale [block 0, token 15, he",
        ),
        ("width_bytes = 3460", "belongs to layer 0 K data [block 1, token 0, head 0]"),
        ("width_bytes = 0", "0 is not a number of bytes"),
        ("width_bytes = 10**6", "1000000 is not a number of bytes"),
    ],
    "09.1": [
        ("claim = kvviz.audit.claims.Covers('layer 0 sent', ('layer 0 K data', 'layer 0 V data'))", "finds 160 bytes"),
        ("claim = kvviz.audit.claims.Covers('layer 0 sent', ('layer 0 K scale',))", "finds 0 bytes that are not sent"),
        ("claim = kvviz.audit.claims.Disjoint(('layer 0 sent', 'layer 1 K data'))", "finds 0 bytes that are not sent"),
        (
            "claim = kvviz.audit.claims.Covers('layer 0 sent', ('layer 0',))",
            "names the view 'layer 0', which is not among",
        ),
    ],
    "10.1": [
        ("return num_seqs * context * num_heads * cell_bytes", "bfloat16: 1,073,741,824 bytes are fewer than"),
        ("return 2 * num_seqs * context * 32 * cell_bytes", "bfloat16: 8,589,934,592 bytes are more than"),
        ("return 2 * num_seqs * context * num_heads * 256", "fp8: 2,147,483,648 bytes are more than"),
    ],
    "10.2": [
        ("return 8", "64 sequences, 8 heads: 8 splits are 4,096 programs, waves: 4; good, but there are fewer"),
        ("return 6", "64 sequences, 8 heads: 6 splits are 3,072 programs, waves: 3; good, but there are fewer"),
        ("return 3", "64 sequences, 8 heads: 3 splits are 1,536 programs, waves: 2, each of 1/3 of the context"),
        ("return FITS // (num_seqs * num_heads) * 8", "64 sequences, 8 heads: 16 is not a number from 1 to 8"),
    ],
    "12.1": [
        ("return byte // 13056 % 30, byte // 13056 // 30", "the numbers are exchanged"),
        ("return byte // 13056 // 64, byte // 13056 % 64", "which comes first in the buffer"),
        ("return byte // 13056", "must return two numbers"),
    ],
    "13.1": [
        ("return other_bytes // token_bytes", "shared: 8 is wrong. Where do the tokens around this one begin and end?"),
        ("return -(-other_bytes // token_bytes)", "unequal, roles swapped: 33 is wrong"),
    ],
}
"""For each exercise, likely mistakes. Each mistake has a part of the message of the check."""

ANSWERS = {
    "00.1": ("196, 200", "196 to"),
    "01.1": ("all_of_k", "160 +"),
    "02.1": ("1, 2, 3",),
    "02.2": ("// 4",),
    "03.1": ("+ data_bytes",),
    "03.2": ("None",),
    "04.1": ("was tail",),
    "05.1": ("constructor    pairs", "at the spec"),
    "06.1": ("'infrastructure' ign", "connection in"),
    "07.1": ("+ data_bytes", "size == 1"),
    "08.1": ("3456",),
    "09.1": ("Covers(", "64 bytes", "256"),
    "10.1": ("1,107,296,256", "570,425,344", "2 *"),
    "10.2": ("fits", "4 splits", "2 splits"),
    "12.1": ("% 30", "// 30"),
    "13.1": ("-(-", "min(", " 9 "),
}
"""For each exercise, words of the solution that the check must not print."""


UNUSABLE = (
    "'x'", "3.5", "[]", "()", "{{}}", "object()", "float('nan')", "''", "-7", "10**12", "b'1'", "[None]", "['a', 'b']",
    "1j", "print", "range(0)", "[[1], [2]]", "set()", "-1.0", "'nothing of this'",
)  # fmt: skip
"""Answers that are wrong in every exercise. The check answers each of them with a sentence."""

KINDS = {
    "00.1": "numbers", "01.1": "number", "02.1": "numbers", "02.2": "pair", "03.1": "number", "03.2": "none",
    "04.1": "word", "05.1": "words", "06.1": "word", "07.1": "bool", "08.1": "number", "09.1": "claim",
    "10.1": "number", "10.2": "number", "12.1": "numbers", "13.1": "number",
}  # fmt: skip
"""For each exercise, what an answer is."""

FORMS = {
    "number": ("float({})", "str({})", "__import__('numpy').int64({})", "__import__('torch').tensor({})",
               "__import__('numpy').array([{}])"),
    "numbers": ("list({})", "tuple(map(float, {}))", "__import__('numpy').array({})", "__import__('torch').tensor({})",
                "', '.join(map(str, {}))"),
    "pair": ("list({})", "[__import__('numpy').array(({})[0]), ({})[1]]", "(tuple(map(float, ({})[0])), ({})[1])",
             "(list(({})[0]), __import__('torch').tensor(({})[1]))", "(({})[0], str(({})[1]))"),
    "word": ("({}).upper()", "' ' + ({}) + ' '", "__import__('numpy').str_({})", "({}).title()", "f'{{{}}}\\n'"),
    "words": ("{{k: v.upper() for k, v in ({}).items()}}", "{{k: f' {{v}}' for k, v in ({}).items()}}",
              "dict(reversed(({}).items()))", "{{k: v.title() for k, v in ({}).items()}}", "dict({})"),
    "bool": ("int({})", "float({})", "__import__('numpy').bool_({})", "__import__('torch').tensor({})",
             "__import__('numpy').array([{}])"),
    "claim": ("kvviz.audit.claims.Covers('layer 0 sent', list(of_layer_0))",
              "kvviz.audit.claims.Covers('layer 0 sent', of_layer_0[::-1])",
              "kvviz.audit.claims.Covers('layer 0 sent', content=of_layer_0)",
              "kvviz.audit.claims.Covers(extent='layer 0 sent', content=of_layer_0)",
              "kvviz.audit.claims.Covers('layer 0 sent', tuple(sorted(of_layer_0)))"),
}  # fmt: skip
"""For each kind of answer, other forms of the right answer. The form has {} in place of the answer."""


def answered(solution: str, form: str) -> str:
    """Return the code of a solution whose last answer has another form."""
    lines = solution.splitlines()
    at = max(n for n, line in enumerate(lines) if re.match(r"\s*(return\b|\w+ = )", line))
    start, given = re.match(r"(\s*(?:return|\w+ =)\s)(.*)", lines[at]).groups()
    lines[at] = start + form.format(*[f"({given})"] * form.replace("{{", "").count("{"))
    return "\n".join(lines)


def by_solution(path: Path) -> list[tuple[int, int]]:
    """Return for each exercise the position of the solution's cell and the position of the check's cell."""
    cells = nbformat.read(path, 4).cells
    solutions = [at for at, cell in enumerate(cells) if cell.cell_type == "code" and tagged(cell, "solution")]
    checks = [at for at, cell in enumerate(cells) if tagged(cell, "check")]
    assert len(solutions) == len(checks), path.name
    assert all(s < c for s, c in zip(solutions, checks, strict=True)), path.name
    assert all(c < s for s, c in zip(solutions[1:], checks, strict=False)), path.name
    return list(zip(solutions, checks, strict=True))


def names(source: str) -> tuple[set[str], set[str], set[str]]:
    """Return three sets of names: names that a cell binds (but not in loops), changes, and only reads."""
    tree, top = ast.parse(source), symtable.symtable(source, "cell", "exec")
    loops = {part.id for node in ast.walk(tree) if isinstance(node, ast.For) for part in targets(node.target)}
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    bound = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    read_here = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    changed = {part.id for node in stores for part in targets(node.value)}
    return bound - loops, changed, (read_here | inner(top)) - bound - loops


def targets(node: ast.expr) -> list[ast.Name]:
    return [part for part in ast.walk(node) if isinstance(part, ast.Name)]


def inner(table: symtable.SymbolTable) -> set[str]:
    """Return the global names that functions in the table read."""
    found = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return found.union(*map(inner, table.get_children()))


def needed(cells: list, exercises: list[tuple[int, int]]) -> list[int]:
    """Return the code cells of the exercises, and the earlier code cells that they need, in order."""
    own = {at for pair in exercises for at in range(pair[0], pair[1] + 1)}
    wanted, kept = set(), []
    for at in range(max(own), -1, -1):
        if cells[at].cell_type == "code":
            bound, changed, mentioned = names(cells[at].source)
            if at in own or (bound | changed) & wanted:
                wanted = (wanted - bound) | mentioned
                kept.append(at)
    return kept[::-1]


class Attempt:
    """Runs cells of a notebook in this process. What the cells display is rendered, as in Jupyter."""

    def __init__(self) -> None:
        self.space, self.cells = {"__name__": "__main__", "display": self.display}, 0

    def display(self, *things) -> None:
        for thing in things:
            thing._repr_mimebundle_() if hasattr(thing, "_repr_mimebundle_") else thing._repr_html_()

    def run(self, *sources: str) -> None:
        for source in sources:
            self.cells += 1
            name = f"<cell {self.cells} of {id(self)}>"
            linecache.cache[name] = (
                len(source),
                None,
                source.splitlines(keepends=True),
                name,
            )  # Triton reads kernels here
            exec(compile(source, name, "exec"), self.space)

    def said(self, *sources: str) -> str:
        """Run all sources and return the message of the error that the last one raises."""
        self.run(*sources[:-1])
        with pytest.raises(WrongAnswerError) as raised:
            self.run(sources[-1])
        return str(raised.value)


def test_kernels_in_cells_have_a_source():
    """Check that Python finds the source of a function in a cell: Triton's compiler for GPUs needs the source."""
    attempt = Attempt()
    attempt.run("one = 1", "def two():\n    return one + 1\n")
    assert inspect.getsource(attempt.space["two"]) == "def two():\n    return one + 1\n"


def with_model(path: Path):
    marks = [pytest.mark.notebook, pytest.mark.slow] if path.stem[:2] in WITH_MODEL else []
    return pytest.param(path, marks=marks, id=path.stem[:2])


@pytest.mark.parametrize("path", [with_model(path) for path in EXERCISES])
def test_solutions_pass_and_holes_and_mistakes_do_not(path, monkeypatch, capsys, request):
    if path.stem[:2] in WITH_MODEL:
        request.getfixturevalue("model_path")
    monkeypatch.chdir(FOLDER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")])))
    cells, exercises, attempt = nbformat.read(path, 4).cells, by_solution(path), Attempt()
    checks = {check: number for number, (_, check) in enumerate(exercises, 1)}
    for at in needed(cells, exercises):
        if at not in checks:
            attempt.run(cells[at].source)
            continue
        name, solution = f"{path.stem[:2]}.{checks[at]}", exercises[checks[at] - 1][0]
        own = cells[solution].source
        later = [cell.source for cell in cells[solution + 1 : at + 1] if cell.cell_type == "code"]
        said = attempt.said(hole(own), *later)
        assert re.match(rf"Exercise {re.escape(name)}: not yet. Not solved yet: \w.*\w\.$", said)
        for slip, words in SLIPS[name]:
            capsys.readouterr()
            tried = MARKED.sub(lambda mark, slip=slip: textwrap.indent(slip, mark[1]), own)
            said = attempt.said(tried, *later)
            assert words.casefold() in said.casefold(), slip
            assert not [answer for answer in ANSWERS[name] if answer in said + capsys.readouterr().out], slip
        for answer in UNUSABLE:
            capsys.readouterr()
            said = attempt.said(answered(own, answer), *later)
            assert "Your code raised" not in said and "cannot be checked" not in said, (answer, said)
            said += capsys.readouterr().out.replace(answer, "")  # the check may repeat what it was given
            assert not [word for word in ANSWERS[name] if word in said.replace(answer, "")], answer
        for form in FORMS.get(KINDS[name], ("{}",)):
            attempt.run(answered(own, form), *later)
            assert f"Exercise {name}: yes\nThis shows that" in capsys.readouterr().out, form
        attempt.run(own, *later)


@EVERY
def test_every_notebook_has_exercises_by_number_with_hints(path):
    cells = nbformat.read(path, 4).cells
    exercises = by_solution(path)
    titles = re.findall(r"^## Exercise (\S+):? ", "\n".join(c.source for c in cells if c.cell_type == "markdown"), re.M)
    assert titles == [f"{path.stem[:2]}.{n}:" for n in range(1, len(exercises) + 1)] and titles
    for _, check in exercises:
        assert cells[check + 1].source.startswith("<details><summary>") and "int</summary>" in cells[check + 1].source


@EVERY
def test_only_exercises_need_exercises(path):
    """Check that a reader can leave a hole open and still run all cells after the exercise."""
    assert not leaning(nbformat.read(path, 4).cells, by_solution(path)), path.name


def leaning(cells: list, exercises: list[tuple[int, int]]) -> list[int]:
    """Return the code cells outside exercises that read a name that an earlier exercise binds or changes."""
    own = {at for pair in exercises for at in range(pair[0], pair[1] + 1)}
    unsure, found = set(), []
    for at, cell in enumerate(cells):
        if cell.cell_type == "code":
            bound, changed, mentioned = names(cell.source)
            found += [at] if at not in own and (mentioned | changed) & unsure else []
            unsure = unsure | bound | changed if at in own else unsure - bound
    return found


def test_a_cell_that_needs_an_exercise_is_found():
    sources = ["x = 1", "def f(): return 2", "y = f()\nd[0] = y", "print(x)", "f()", "y = 3", "print(y)", "print(d)"]
    assert leaning([new_code_cell(source) for source in sources], [(1, 2)]) == [4, 7]


@pytest.mark.notebook
@pytest.mark.parametrize("path", EXERCISES[:3] + EXERCISES[-1:], ids=lambda path: path.stem[:2])
def test_participants_copies_run_to_the_end_and_only_checks_fail(path, tmp_path):
    node = participants(read(path).node)
    shutil.copytree(FOLDER, tmp_path / "here")
    executed, failure = execute(Notebook(tmp_path / "here" / path.name, node, "x"), lambda *cell: None, CELL_TIMEOUT_S)
    assert failure is None
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    said = [output.evalue for cell in code for output in cell.outputs if output.output_type == "error"]
    numbers = [line.partition(": not yet. Not solved yet: ")[0].rpartition(".")[2] for line in said]
    assert numbers == [str(number) for number in range(1, len(by_solution(path)) + 1)]
    assert all(cell.execution_count for cell in code)


@EVERY
def test_solutions_are_in_one_copy_only(path):
    """Check that the participants' copy has neither the code of a solution nor its explanation."""
    node = read(path).node
    given, kept = participants(node), instructor(node)
    for cell in node.cells:
        if tagged(cell, "solution"):
            longest = max(solved(cell.source).splitlines()[1:] or [solved(cell.source)], key=len)
            assert longest not in "\n".join(one.source for one in given.cells)
            assert longest in "\n".join(one.source for one in kept.cells)
    assert len(kept.cells) == len(node.cells)
    assert not any("# solution" in cell.source for cell in (*given.cells, *kept.cells))


def test_the_challenge_is_the_same_in_both_copies():
    """Check that the challenge contains no answer: each call of ``answer`` has only None."""
    (path,) = set(NOTEBOOKS) - set(EXERCISES)
    node = read(path).node
    assert participants(node) == instructor(node) == node
    code = [cell.source for cell in node.cells if cell.cell_type == "code"]
    given = [source for source in code if re.match(r"\w+ = answer\((easy|full|fresh)\[", source)]
    assert len(given) == 13 and all("kind=None, first_byte=None, fix=None" in source for source in given)


def test_some_exercise_comes_first_of_all():
    """Check that a reader of notebook 00 writes a line after at most three code cells."""
    first = by_solution(NOTEBOOKS[0])[0][0]
    code = [cell for cell in nbformat.read(NOTEBOOKS[0], 4).cells[:first] if cell.cell_type == "code"]
    assert len(code) <= 3


class TestHole:
    def test_a_function_keeps_its_head_and_returns_three_dots(self):
        source = (
            "def f(x):\n    y = 1\n    # solution\n    # how\n    z = x + y\n\n    return z * 2\n    # end of solution"
        )
        assert hole(source) == "def f(x):\n    y = 1\n    # your code here (about 2 lines)\n    return ..."
        assert solved(source) == "def f(x):\n    y = 1\n    # how\n    z = x + y\n\n    return z * 2"

    def test_a_name_gets_three_dots_and_a_dict_keeps_its_keys(self):
        assert hole("# solution\nn = 3\n# end of solution\nm = 4") == "# your code here (about 1 line)\nn = ...\nm = 4"
        assert hole('# solution\nn = {"a": 3, "b": 4}\n# end of solution').endswith('\nn = {"a": ..., "b": ...}')

    @pytest.mark.parametrize("body", ["print(1)", "", "a, b = 1, 2", "x[0] = 1", "# nothing"])
    def test_a_solution_without_a_last_value_is_refused(self, body):
        with pytest.raises(ValueError, match="a solution must end in"):
            hole(f"# solution\n{body}\n# end of solution")

    @pytest.mark.parametrize("source", ["x = 1", "# solution\nx = 1", "x = 1\n# end of solution"])
    def test_marks_come_in_pairs(self, source):
        with pytest.raises(ValueError, match="do not come in pairs"):
            hole(source)


SOLVED = "def f():\n    # solution\n    return 42\n    # end of solution"


def lesson(folder: Path, *extra) -> Path:
    """Make a folder with one notebook and a data file, and return the folder."""
    folder.mkdir()
    cells = [
        new_code_cell(SOLVED, id="a", metadata={"tags": ["solution"]}),
        new_code_cell('assert f() is not ..., "not yet"\nprint("seen", f())', id="b", metadata={"tags": ["check"]}),
        new_markdown_cell("a hint", id="c"),
        new_markdown_cell("the reason", id="d", metadata={"tags": ["solution"]}),
        *extra,
    ]
    nbformat.write(new_notebook(cells=cells), folder / "01_x.ipynb")
    (folder / "data.json").write_text("{}")
    return folder


def test_both_copies_are_written_with_data_and_run_on(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(lesson(tmp_path / "in"), out) == 0
    assert "1 notebook: " in (said := capsys.readouterr().out) and "1 hole, " in said
    given, kept = (read(out / kind / "01_x.ipynb") for kind in ("participants", "instructor"))
    assert [cell.id for cell in given.node.cells] == ["a", "b", "c"] and [c.id for c in kept.node.cells] == list("abcd")
    assert kept.node.cells[0].source == "def f():\n    return 42"
    assert (out / "participants" / "data.json").exists() and (out / "instructor" / "data.json").exists()
    assert [cell.metadata.get("tags", []) for cell in given.node.cells] == [[], ["raises-exception"], []]
    assert not any(cell.metadata.get("tags") for cell in kept.node.cells)
    executed, failure = execute(given, lambda *cell: None, CELL_TIMEOUT_S)
    assert failure is None and executed.cells[1].outputs[0].evalue == "not yet"
    assert "your code here" in render_page(executed, "x", Frame(out, {}, "2001-02-03"), None, None)


@pytest.mark.parametrize("kind", ["participants", "instructor"])
@pytest.mark.parametrize("name", ["01_x.ipynb", "data.json"])
@pytest.mark.parametrize("work", [b"mine", b"\xff not text", None], ids=["text", "bytes", "folder"])
def test_somebodys_work_is_never_overwritten(tmp_path, capsys, kind, name, work):
    folder, out = lesson(tmp_path / "in"), tmp_path / "out"
    assert main(folder, out) == main(folder, out) == 0
    mine, missing = out / kind / name, out / "instructor" / ("data.json" if name == "01_x.ipynb" else "01_x.ipynb")
    missing.unlink()
    mine.unlink()
    if work is None:
        mine.mkdir()
    else:
        mine.write_bytes(work)
    capsys.readouterr()
    assert main(folder, out) == 2
    said = capsys.readouterr().err
    assert f"workshop: {mine} exists and may contain somebody's work, so nothing was written. Move {out} to" in said
    assert mine.is_dir() if work is None else mine.read_bytes() == work
    assert not missing.exists() and not list(out.rglob("*.part"))


def test_a_link_that_leads_nowhere_is_somebodys_work_too(tmp_path):
    folder, out = lesson(tmp_path / "in"), tmp_path / "out"
    (out / "participants").mkdir(parents=True)
    (out / "participants" / "data.json").symlink_to(tmp_path / "gone")
    assert main(folder, out) == 2 and not (tmp_path / "gone").exists()


def test_a_notebook_without_copies_is_named(tmp_path):
    folder = lesson(tmp_path / "in", new_code_cell("x = 1", id="e", metadata={"tags": ["solution"]}))
    with pytest.raises(ValueError, match=r"01_x\.ipynb: .* in pairs"):
        main(folder, tmp_path / "out")
    (folder / "01_x.ipynb").write_text("{")
    with pytest.raises(ValueError, match=r"01_x\.ipynb cannot be read"):
        main(folder, tmp_path / "out")
    (folder / "01_x.ipynb").unlink()
    with pytest.raises(ValueError, match="contains no .ipynb file"):
        main(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_report_shows_the_hole_and_folds_the_solution_away(tmp_path):
    path = lesson(tmp_path / "in") / "01_x.ipynb"
    executed, failure = execute(Notebook(path, read(path).node, "x"), lambda *cell: None, CELL_TIMEOUT_S)
    assert failure is None
    page = render_page(executed, "x", Frame(path.parent, {}, "2001-02-03"), None, None)
    body = re.sub(r"<[^>d/]*>|<(?!/?details)[^>]*>", "", page.partition("<main")[2])
    unfolded = re.sub(r"<details.*?</details>", "", body, flags=re.DOTALL)
    assert "your code here (about 1 line)" in unfolded and "a hint" in unfolded
    assert "42" not in unfolded and "return 42" in body and "seen 42" in body


def rebound(cells: list) -> list[str]:
    """Return the names that a code cell reads, and that a later cell binds again."""
    code = [names(cell.source) for cell in cells if cell.cell_type == "code"]
    found = []
    for at, (_, changed, read_here) in enumerate(code):
        for name in sorted(changed | read_here):
            if any(name in bound for bound, _, _ in code[:at]) and any(name in bound for bound, _, _ in code[at + 1 :]):
                found.append(f"code cell {at + 1} reads {name}")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_a_cell_can_run_again_after_later_cells(path):
    """Check that no later cell changes what a cell reads. So a cell that runs again gives the same result."""
    assert rebound(nbformat.read(path, 4).cells) == []


def test_a_name_that_is_bound_again_is_found():
    assert rebound([new_code_cell(source) for source in ("x = 1", "print(x)", "x = 2")]) == ["code cell 2 reads x"]
