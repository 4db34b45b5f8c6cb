"""The form checks answers with hashes, and holds no answer in clear text."""

import re

import pytest

from kvviz.challenge.answer_form import AnswerForm, hashes
from kvviz.challenge.questions import FIRST_BYTE, PARTS, challenge, check, right_answers


@pytest.mark.parametrize("level", ["easy", "full"])
def test_right_answers_solve_the_case(level):
    for case in challenge(1, level):
        right = right_answers(case)
        byte = None if right["first byte"] == ("none",) else int(right["first byte"][0])
        for fix in right["fix"]:
            assert check(case, kind=right["kind"][0], first_byte=byte, fix=fix).solved


def test_a_part_that_is_not_given_is_never_confirmed():
    """A file without a first byte must not say "first byte right" if no byte and no kind is given."""
    case = next(case for case in challenge(1, "full") if right_answers(case)["first byte"] == ("none",))
    (kind,) = right_answers(case)["kind"]
    other = next(one for one, words in FIRST_BYTE.items() if words != "None")
    assert check(case, fix=right_answers(case)["fix"][0]).missing == ("kind", "first byte")
    assert check(case, kind=other).missing == ("first byte", "fix")
    assert check(case, kind=kind).wrong == ("fix",)


def test_the_page_holds_hashes_only():
    for level in ("easy", "full"):
        for case in challenge(1, level):
            right, held = right_answers(case), hashes(case)
            script = AnswerForm(case)._repr_html_().partition("<script>")[2].replace("SHA-256", "")
            given = script.partition("const box")[2].partition("if (!box")[0]
            assert not [word for part in PARTS for word in right[part] if re.search(rf"\b{word}\b", given)]
            assert {part: len(held[part]) for part in PARTS} == {part: len(right[part]) for part in PARTS}
            assert all(re.fullmatch("[0-9a-f]{32}", one) for part in PARTS for one in held[part])


@pytest.mark.browser
def test_the_form_checks_answers_in_a_page(chromium, tmp_path):
    case = challenge(1)[0]
    page_file = tmp_path / "page.html"
    page_file.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><body>{AnswerForm(case)._repr_html_()}', encoding="utf-8"
    )
    context = chromium.new_context(offline=True)
    page = context.new_page()
    page.goto(page_file.as_uri())
    right = right_answers(case)
    page.get_by_label("kind").select_option(right["kind"][0])
    page.get_by_role("button", name="Check").click()
    page.get_by_text("kind: right, first byte: not given yet, fix: not given yet.").wait_for()
    page.get_by_label("first byte").fill("123456")
    page.get_by_label("fix").select_option(right["fix"][0])
    page.get_by_label("first byte").press("Enter")
    page.get_by_text("kind: right, first byte: wrong, fix: right.").wait_for()
    page.get_by_label("first byte").fill(f" {int(right['first byte'][0]):,} ")
    page.get_by_role("button", name="Check").click()
    page.get_by_text("Solved!").wait_for()
    context.close()
