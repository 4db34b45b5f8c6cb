"""The cards of the case book: all 33 cases, and on each card what the audit and the diagnosis say."""

import re
from pathlib import Path

import nbformat
import pytest

from kvviz.audit.case_book import cases
from kvviz.audit.causes import CAUSES
from kvviz.show.case_cards import Card, CaseCards
from tests.show.test_audit_page import Page


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
def test_a_card_tells_the_report_and_the_diagnosis(case):
    card, text = Card(case), Page(Card(case).html).text
    assert all(case[field] in text for field in ("id", "symptom", "mechanism", "verdict", "fix"))
    assert f"{case['repo']}#{case['number']}" in text
    if not case["cause"]:
        assert card.headline == "Clean: every claim holds." and card.result.verdict in text
        return
    (one,) = card.diagnoses
    assert one.cause == case["cause"] and CAUSES[one.cause].meaning in card.headline
    assert one.text in text and one.effect in text and one.repair in text
    assert ("the same claims are clean" in text) == one.proved


def test_all_cases_are_on_the_cards_once():
    book = cases()
    for shown in (CaseCards.of(book), CaseCards.by_cause(book)):
        page = Page(shown._repr_html_())
        assert page.open == [] and page.links == []
        for case in book:
            assert page.text.count(f"{case['id']}: ") == 1 and f" {case['id']} " in repr(shown)
    groups = [len(cards) for cards in CaseCards.by_cause(book).groups.values()]
    assert sum(groups) == len(book) == 33 and groups == sorted(groups, reverse=True)


def test_names_are_escaped():
    case = dict(cases()[0], symptom="<script>alert(1)</script>")
    assert "<script" not in CaseCards.of([case])._repr_html_()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_closed_cards_are_short_and_open_ones_fit(shown, width):
    page = shown(CaseCards.by_cause(cases())._repr_html_(), width=width)
    assert page.evaluate("document.documentElement.scrollHeight") < 1300
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    without_place = {"AMBIG-HEADS-2", "AMBIG-MLA-OUTER", "CLIP-OOB-TPU"}
    drawn = [case["id"] for case in cases() if case["cause"] and case["id"] not in without_place]
    assert page.locator("svg[role=img]").count() == len(drawn)


def test_notebook_09_tells_every_case_by_name():
    """Each case has either steps of its own or a card in the section of its kind."""
    path = Path(__file__).parents[2] / "notebooks" / "09_the_case_book.ipynb"
    code = "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
    steps = re.findall(r'^verdict\("([\w-]+)"\)', code, re.MULTILINE)
    on_cards = [name for names in re.findall(r"^cards\((.*)\)$", code, re.MULTILINE) for name in names.split(", ")]
    told = [*steps, *(name.strip('"') for name in on_cards)]
    assert sorted(told) == sorted(case["id"] for case in cases()) and len(steps) == 16
    assert "CaseCards.by_cause(book.values())" in code
