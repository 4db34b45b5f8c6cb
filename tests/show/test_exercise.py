"""Checks of exercises: answers in any usual form, short boxes, and errors that have no traceback in Jupyter."""

import numpy as np
import pytest
import torch

from kvviz.show.exercise import Box, WrongAnswerError, exercise, solved, whole, wholes, word, yes_or_no


@pytest.mark.parametrize(
    "answer", [3, 3.0, "3", " 3 ", np.int8(3), np.array([3]), torch.tensor(3), torch.tensor([3.0])]
)
def test_a_whole_number_in_any_form(answer):
    assert whole(answer) == 3 and type(whole(answer)) is int


@pytest.mark.parametrize("answer", [None, 3.5, "x", "", True, [3], 3j, float("inf"), torch.ones(2), object(), b"3"])
def test_anything_else_is_a_sentence(answer):
    with pytest.raises(AssertionError, match=r"^it must be a whole number, but it is .*\.$"):
        whole(answer, "it")


@pytest.mark.parametrize(
    "answer", [[1, 2], (1.0, 2.0), range(1, 3), "1, 2", "[1 2]", np.array([1, 2]), torch.tensor([1, 2])]
)
def test_several_numbers_in_any_form(answer):
    assert wholes(answer) == [1, 2]
    assert wholes({1}) == wholes(1) == [1]


def test_words_and_booleans():
    assert word(" NHD\n", ("NHD", "HND")) == "NHD" and yes_or_no(np.bool_(True)) and not yes_or_no(0)
    for call in (lambda: word(3, ("a",)), lambda: yes_or_no("yes"), lambda: yes_or_no(2), lambda: solved(..., "write")):
        with pytest.raises(AssertionError, match=r"\.$"):
            call()


def test_a_wrong_answer_is_a_box_and_an_error_without_a_traceback(capsys):
    with pytest.raises(WrongAnswerError) as raised, exercise("1.1", hint="Count <again>.", proves="it works"):
        raise AssertionError("7 is too many.")
    assert str(raised.value) == "Exercise 1.1: not yet. 7 is too many."
    assert raised.value._render_traceback_() == ["Exercise 1.1: not yet"]
    assert capsys.readouterr().out == "Exercise 1.1: not yet\n7 is too many.\nHint: Count <again>.\n"
    html = Box("t", "a < b", "Count <again>.")._repr_html_()
    assert "a &lt; b" in html and "<summary" in html and "Count &lt;again&gt;." in html


def test_an_error_in_the_answer_is_named():
    with (
        pytest.raises(
            WrongAnswerError, match="cannot be checked. Your code raised ZeroDivisionError: division by zero"
        ),
        exercise("1.1", hint="", proves=""),
    ):
        print(1 / 0)


def test_a_right_answer_says_what_it_proves(capsys):
    with exercise("1.1", hint="h", proves="two views overlap"):
        pass
    assert capsys.readouterr().out == "Exercise 1.1: yes\nThis shows that two views overlap.\n"


def test_an_interrupt_stays_an_interrupt():
    with pytest.raises(KeyboardInterrupt), exercise("1.1", hint="", proves=""):
        raise KeyboardInterrupt
