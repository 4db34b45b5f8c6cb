"""Predictions, the matrix and differences between releases. No engine is needed."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvviz import __main__ as cli
from kvviz.bench import engine_matrix, engine_run, prediction
from kvviz.bench.engine_diff import diff_text, differences
from kvviz.bench.engine_run import EngineFailedError, EngineSettings
from kvviz.bench.prediction import disagreements, predict
from tests.bench.fake_engine import fake_record


@pytest.mark.parametrize(
    ("release", "connector", "layout", "right"),
    [
        ("0.25.1", "none", "NHD", True),
        ("0.25.1", "prefer-cross-layer", "cross-layer NHD", False),
        ("0.25.1", "multi-of-two", "cross-layer NHD", False),
        ("0.26.0", "prefer-cross-layer", "BLNHC", True),
        ("0.27.1", "prefer-cross-layer", "LBNHC", True),
        ("0.32.0", "prefer-cross-layer", "BLNHC", True),
    ],
)
def test_the_bug_and_its_repairs_are_predicted(release, connector, layout, right):
    found = predict(EngineSettings(release, connector=connector))
    assert (found.layout, found.text_right, found.clean) == (layout, right, right)


def test_permuted_scales_do_not_change_the_text():
    found = predict(EngineSettings("0.25.1", layout="HND"))
    assert found.kinds.keys() == {"permuted"} and found.text_right and not found.clean


def test_a_run_as_predicted_has_no_disagreement_and_another_run_says_which():
    record = fake_record(connector="prefer-cross-layer")
    expected = predict(record.settings)
    assert disagreements(expected, record, text_right=False) == ()
    other = replace(record, kinds={}, found=replace(record.found, cross_layer=False))
    said = disagreements(expected, other, text_right=True)
    assert [one.partition(":")[0] for one in said] == ["one buffer for all layers", "findings", "right text"]


def test_an_answer_is_right_if_it_begins_the_expected_one():
    assert prediction.is_right((1, 2), (1, 2, 3)) and not prediction.is_right((1, 3), (1, 2, 3))


@pytest.fixture
def fake_run(monkeypatch):
    calls = []

    def run(settings, progress):
        calls.append(settings)
        if settings.release == "0.24.0":
            raise EngineFailedError("sentence with a path", "ValueError: no")
        return fake_record(settings.release, settings.connector, settings.kv_cache_dtype, settings.layout)

    monkeypatch.setattr(engine_matrix, "run", run)
    monkeypatch.setattr(engine_matrix, "kit_answer", lambda prompt, tokens: ((504, 6376, 7), "The sky is"))
    monkeypatch.setattr(engine_matrix, "token_texts", lambda ids: {str(token): f"<{token}>" for token in ids})
    return calls


def test_the_matrix_is_continued_where_it_ended(fake_run, tmp_path):
    path, wanted = tmp_path / "engines.json", list(engine_matrix.cells())
    said = []
    assert engine_matrix.record_matrix(path, wanted, said.append, most=3) == 3
    assert engine_matrix.record_matrix(path, wanted, said.append, most=2) == 2
    assert fake_run == wanted[:5]
    content = json.loads(path.read_text())
    assert len(content["runs"]) == 5 and content["answer"]["text"] == "The sky is"
    assert all(content["token_texts"][str(token)] for run in content["runs"] for token in run["token_ids"])
    assert content["runs"][1]["disagreements"] == ["right text: predicted False, observed True"]
    assert content["releases"]["0.25.1"]["replaced"][0]["part"] == "sampler"
    assert said[1].startswith("0.25.1 fp8_per_token_head prefer-cross-layer NHD: cross-layer, 2 collision, 60 mis")


def test_a_run_that_cannot_run_says_why_and_is_not_tried_again(fake_run, tmp_path):
    path, wanted = tmp_path / "engines.json", [EngineSettings("0.24.0")]
    for expected in (1, 0):
        assert engine_matrix.record_matrix(path, wanted, lambda sentence: None) == expected
    (entry,) = json.loads(path.read_text())["runs"]
    assert entry["cannot"] == "ValueError: no" and "found" not in entry and entry["predicted"]["layout"] == "NHD"


RECORDED = Path(__file__).parents[2] / "notebooks" / "recorded_engines.json"


def test_the_recorded_matrix_shows_the_bug_and_its_repairs_as_predicted():
    matrix = engine_matrix.read_matrix(RECORDED)
    first = [engine_matrix.find(matrix, EngineSettings(*one)) for one in engine_matrix.FIRST]
    assert [run["text_right"] for run in first] == [True, False, True, True, True, True]
    assert [run["found"]["cross_layer"] for run in first] == [False, True, True, False, False, False]
    assert first[1]["kinds"]["collision"]["first_byte"] == 64


def test_the_table_in_the_docs_has_the_recorded_answers_and_seconds():
    matrix, page = engine_matrix.read_matrix(RECORDED), (RECORDED.parents[1] / "docs" / "engine.md").read_text()
    for one in engine_matrix.FIRST:
        run = engine_matrix.find(matrix, EngineSettings(*one))
        line = next(line for line in page.splitlines() if line.startswith(f"| {one[0]} | {one[2]} |"))
        assert line.endswith(f"| `{run['text']}` | {run['seconds']['total']:.0f} |") and run["found"]["order"] in line


def test_the_docs_count_the_runs():
    runs, page = engine_matrix.read_matrix(RECORDED)["runs"], (RECORDED.parents[1] / "docs" / "engine.md").read_text()
    cannot = sum("cannot" in run for run in runs)
    wrong = sum(bool(run.get("disagreements")) for run in runs)
    words = " ".join(page.split())
    assert f"The file has {len(runs)} entries: {len(runs) - cannot} engines ran, and {cannot} cannot run" in words
    assert f"{wrong} runs disagree with their prediction" in words
    assert len(runs) == len(list(engine_matrix.cells()))


def test_the_recorded_predictions_are_those_of_today():
    keys = ("release", "kv_cache_dtype", "connector", "layout")
    for run in engine_matrix.read_matrix(RECORDED)["runs"]:
        today = predict(EngineSettings(*(run[key] for key in keys)))
        assert run["predicted"] == asdict(today), [run[key] for key in keys]
        assert ("cannot" in run) != ("found" in run)


def test_the_matrix_holds_each_combination_once():
    wanted = list(engine_matrix.cells())
    assert len(wanted) == len(set(wanted)) == 7 * 4 * 3 * 2
    assert [(one.release, one.connector) for one in wanted[:6]] == [(one[0], one[2]) for one in engine_matrix.FIRST]


@pytest.mark.parametrize("text", ["{", '{"format": "other"}', "[]"])
def test_another_file_is_not_overwritten(fake_run, tmp_path, capsys, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert cli.main(["engine", "matrix", "--out", str(path), "--runs", "1"]) == 2
    assert path.read_text() == text and str(path) in capsys.readouterr().err and fake_run == []


def test_a_difference_is_found_from_the_runs_alone():
    found = {one.what: (one.before, one.after) for one in differences(fake_record("0.25.1"), fake_record("0.26.0"))}
    assert found["packing"] == ("split", "packed") and found["order of the axes"] == ("LBKNHC", "LBNHKC")
    named = fake_record("0.26.0", layout_names=["LBNHC"], connectors={"base": ["get_required_kvcache_layout"]})
    text = diff_text(fake_record("0.26.0"), named)
    assert "layout names that the engine accepts: NHD, HND -> LBNHC" in text
    assert "a connector is asked for: prefer_cross_layer_blocks -> get_required_kvcache_layout" in text
    assert "NixlConnector answers: prefer_cross_layer_blocks -> absent" in text


def test_two_runs_alike_have_no_differences():
    assert "no differences in" in diff_text(fake_record(), fake_record())


def test_the_commands_print_the_record_and_the_difference(monkeypatch, capsys, tmp_path):
    made = lambda settings, progress, seconds: fake_record(settings.release, settings.connector)  # noqa: E731
    monkeypatch.setattr(engine_run, "run", made)
    out, views = tmp_path / "record.json", tmp_path / "views.json"
    options = ["--connector", "prefer-cross-layer", "--json", str(out), "--views", str(views)]
    assert cli.main(["engine", "vllm", "--release", "0.25.1", *options]) == 1
    assert json.loads(out.read_text())["settings"]["connector"] == "prefer-cross-layer"
    assert cli.main(["audit", str(views)]) == 1
    assert cli.main(["engine", "vllm", "--release", "0.25.1"]) == 0
    assert cli.main(["engine", "diff", "0.25.1", "0.26.0"]) == 0
    assert "packing: split -> packed" in capsys.readouterr().out
