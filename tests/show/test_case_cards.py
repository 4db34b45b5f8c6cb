"""The cards of the case book: all cases, and on each card what the audit and the diagnosis say."""

import re
from collections import Counter
from itertools import groupby
from pathlib import Path

import nbformat
import pytest

from kvviz.audit.case_book import cases
from kvviz.audit.causes import CAUSES
from kvviz.show.case_cards import Card, CaseCards
from tests.show.test_audit_page import Page

WITHOUT_PLACE = {
    "AMBIG-HEADS-2",
    "AMBIG-MLA-OUTER",
    "CLIP-OOB-TPU",
    "WINDOW-POOL-SPACE",
    "STATE-RESUME-COLUMN",
    "INDEXER-PAGE-ROW",
    "CHUNK-TOKEN-TABLE",
    "KERNEL-DCP-SLOT",
}
"""Cases whose finding has no place in the bytes that a picture could show."""


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["id"])
def test_a_card_tells_the_report_and_the_diagnosis(case):
    card, text = Card(case), Page(Card(case).html()).text
    assert all(case[field] in text for field in ("id", "symptom", "mechanism", "verdict", "fix"))
    assert f"{case['repo']}#{case['number']}" in text
    if not case["cause"]:
        assert card.headline == "Clean: every claim holds." and card.result.verdict in text
        return
    (one,) = card.diagnoses
    assert one.cause == case["cause"] and CAUSES[one.cause].meaning in card.headline
    assert one.text in text and one.effect in text and one.repair in text
    assert ("the same claims are clean" in text) == one.proved


def test_a_card_names_its_family_its_symptom_and_its_lesson():
    lessons = {path.name[:2] for path in (Path(__file__).parents[2] / "notebooks").glob("*.ipynb")}
    for case in cases():
        card = Card(case)
        text = Page(card.html()).text
        assert card.lesson in lessons and f"notebook {card.lesson}. What was seen: {case['seen']}." in text
        assert f"kind {case['kind']}, {case['family']}." in text
        assert not case["cause"] or card.lesson == CAUSES[case["cause"]].lesson


def test_all_cases_are_on_the_cards_once():
    book = cases()
    for shown in (CaseCards.of(book), CaseCards.with_filters(book)):
        page = Page(shown._repr_html_())
        assert page.open == [] and page.links == []
        for case in book:
            assert page.text.count(f"{case['id']}: ") == 1 and f" {case['id']} " in repr(shown)
    headlines = [card.headline for card in CaseCards.with_filters(book).cards]
    runs = [len(list(run)) for _, run in groupby(headlines)]
    assert len(runs) == len(set(headlines)) and runs == sorted(runs, reverse=True)


def shown_names(page) -> list[str]:
    return page.evaluate(
        "[...document.querySelectorAll('.kvviz-filtered > details')].filter(card => card.offsetParent)"
        ".map(card => card.querySelector('summary > b').innerText)"
    )


@pytest.mark.browser
@pytest.mark.parametrize("field", ["seen", "family", "repo", "kind"])
def test_a_reader_chooses_cases_from_lists(shown, field):
    """Each list is found by its label, and shows the cases of each of its values. The lists work together."""
    book = cases()
    headlines = {case["id"]: Card(case).headline for case in book}
    times = Counter(headlines.values())
    label = {"seen": "what you see", "family": "family of layers", "repo": "project", "kind": "kind"}[field]
    page = shown(CaseCards.with_filters(book)._repr_html_())
    choice = page.get_by_role("combobox", name=label, exact=True)
    assert len(shown_names(page)) == len(book)
    for value in sorted({case[field] for case in book}):
        wanted = sorted(case["id"] for case in book if case[field] == value)
        choice.select_option(label=f"{value} ({len(wanted)})")
        assert sorted(shown_names(page)) == wanted
        other = page.get_by_role("combobox", name="mistake", exact=True)
        headline = headlines[wanted[0]]
        same = [name for name in wanted if headlines[name] == headline]
        other.select_option(label=f"{headline} ({times[headline]})")
        assert sorted(shown_names(page)) == same
        other.select_option(label="all")
    choice.select_option(label="all")
    assert len(shown_names(page)) == len(book)


@pytest.mark.browser
def test_the_lists_work_with_keys_alone_and_tell_how_many_cases_are_left(shown):
    book = cases()
    page = shown(CaseCards.with_filters(book)._repr_html_())
    count = "getComputedStyle(document.querySelector('.kvviz-count'), '::before').content"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SELECT"
    page.keyboard.type("slow")
    assert sorted(shown_names(page)) == sorted(case["id"] for case in book if case["seen"] == "slow")
    assert "counter" in page.evaluate(count) and f"of {len(book)} cases are shown." in page.inner_text(".kvviz-count")


def test_names_are_escaped():
    case = dict(cases()[0], symptom="<script>alert(1)</script>")
    assert "<script" not in CaseCards.of([case])._repr_html_()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_closed_cards_are_short_and_open_ones_fit(shown, width):
    page = shown(CaseCards.with_filters(cases())._repr_html_(), width=width)
    assert page.evaluate("document.documentElement.scrollHeight") < 60 * (45 if width > 1000 else 80)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = [case["id"] for case in cases() if case["cause"] and case["id"] not in WITHOUT_PLACE]
    assert page.locator("svg[role=img]").count() == len(drawn)


def test_notebook_09_tells_every_case_by_name():
    """A case has steps of its own, a card in the section of its kind, or only a card among all cards at the end."""
    path = Path(__file__).parents[2] / "notebooks" / "09_the_case_book.ipynb"
    code = "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
    steps = re.findall(r'^verdict\("([\w-]+)"\)', code, re.MULTILINE)
    on_cards = [name for names in re.findall(r"^cards\((.*)\)$", code, re.MULTILINE) for name in names.split(", ")]
    told = [*steps, *(name.strip('"') for name in on_cards)]
    assert len(set(told)) == len(told) and {*told} <= {case["id"] for case in cases()} and len(steps) >= 16
    assert {case["kind"] for case in cases()} == {case["kind"] for case in cases() if case["id"] in told}
    assert "CaseCards.with_filters(book.values())" in code
