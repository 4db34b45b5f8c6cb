"""The pages under docs/: every term has its file, and every number on the cheat sheet is what kvviz computes."""

import re
from pathlib import Path

import pytest

from kvviz.memory.finding import KINDS
from kvviz.memory.spec import PER_TOKEN_HEAD_BITS

ROOT = Path(__file__).parent.parent
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"- \*\*([^*]+)\*\* \(`([^`]+)`\): (.+)")
ENTRIES = [match.groups() for match in map(ENTRY.fullmatch, GLOSSARY.splitlines()) if match]


def plain(text: str) -> str:
    """Words in small letters with one blank between them, whatever joined them."""
    return " ".join(re.findall(r"\w+", text.lower()))


class TestGlossary:
    def test_every_line_of_the_list_is_an_entry(self):
        assert len(ENTRIES) == GLOSSARY.count("\n- ") > 50

    def test_no_term_stands_twice_and_all_are_in_order(self):
        terms = [plain(term).replace("_", " ") for term, _, _ in ENTRIES]
        assert terms == sorted(set(terms))

    @pytest.mark.parametrize(("term", "path", "said"), ENTRIES, ids=[term for term, _, _ in ENTRIES])
    def test_an_entry_names_a_file_that_has_the_term_and_says_it_in_two_sentences(self, term, path, said):
        text = (ROOT / path).read_text(encoding="utf-8").replace("zero_point", "zero point")
        assert re.search(rf"\b{re.escape(plain(term))}", plain(text)), f"{path} does not speak of {term!r}"
        assert said.endswith(".") and 1 <= len(re.findall(r"\.(?= |$)", said)) <= 2

    def test_kinds_and_modes_are_terms(self):
        assert {*KINDS, *PER_TOKEN_HEAD_BITS} <= {term for term, _, _ in ENTRIES}
