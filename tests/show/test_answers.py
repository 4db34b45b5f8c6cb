"""Answers as tokens: the first wrong token is marked, in HTML and in text."""

import re
import sys
from types import SimpleNamespace

from kvviz.show.answers import Answer, LiveAnswer, compare_answers

RIGHT = Answer("right", ("The", " sky", " is"), (1.0, 2.0, 3.0))


def test_the_first_wrong_token_is_marked_with_its_margin():
    wrong = Answer("wrong", ("The", "<i>", "\n", "x"), (1.0, 0.25, 4.0, 5.0))
    shown = compare_answers(RIGHT, wrong)
    html = shown._repr_html_()
    assert html.count("outline:") == 1 and re.search(r"outline:[^>]*>&lt;i&gt;<", html) and "↵" in html
    assert str(shown).splitlines()[2].strip() == (
        "Token 1, counted from 0, is the first wrong token: '<i>' instead of ' sky'. "
        "Its logit was 0.25 above the second."
    )


def test_an_answer_like_the_reference():
    shown = compare_answers(RIGHT, Answer("shorter", ("The", " sky")), Answer("longer", (*RIGHT.tokens, " blue")))
    assert "outline:" not in shown._repr_html_()
    assert str(shown).count("Every token is as in the reference.") == 2


def test_without_margins_no_margin_is_told():
    assert "logit" not in str(compare_answers(RIGHT, Answer("a", ("A",))))


def test_a_live_answer_shows_each_token_when_it_arrives(monkeypatch):
    seen = []

    class Handle:
        def update(self, shown):
            seen.append(str(shown))

    def display(shown, display_id):
        seen.append(str(shown))
        return Handle()

    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=object, display=SimpleNamespace(display=display))
    )
    live = LiveAnswer("both", RIGHT)
    live("The", 1.0)
    live(" fog", 0.5)
    assert [text.splitlines()[1] for text in seen] == ["both   The", "both   The| fog"]
    assert "Every token is as in the reference." in seen[0] and "' fog' instead of ' sky'" in seen[1]
    first = LiveAnswer("alone")
    first("The", 1.0)
    assert seen[-1] == "alone  The"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    LiveAnswer("nowhere")("The", 1.0)
    assert len(seen) == 3
