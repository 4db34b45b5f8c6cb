"""Answers as tokens: the first wrong token is marked, in HTML and in text."""

import re

from kvviz.show.answers import Answer, compare_answers

RIGHT = Answer("right", ("The", " sky", " is"), (1.0, 2.0, 3.0))


def test_the_first_wrong_token_is_marked_with_its_margin():
    wrong = Answer("wrong", ("The", "<i>", "\n", "x"), (1.0, 0.25, 4.0, 5.0))
    shown = compare_answers(RIGHT, wrong)
    html = shown._repr_html_()
    assert html.count("outline:") == 1 and re.search(r"outline:[^>]*>&lt;i&gt;<", html) and "↵" in html
    assert str(shown).splitlines()[2].strip() == (
        "Token 2 is the first wrong token: '<i>' instead of ' sky'. Its margin is 0.25."
    )


def test_an_answer_like_the_reference():
    shown = compare_answers(RIGHT, Answer("shorter", ("The", " sky")), Answer("longer", (*RIGHT.tokens, " blue")))
    assert "outline:" not in shown._repr_html_()
    assert str(shown).count("Every token is as in the reference.") == 2


def test_without_margins_no_margin_is_told():
    assert "margin" not in str(compare_answers(RIGHT, Answer("a", ("A",))))
