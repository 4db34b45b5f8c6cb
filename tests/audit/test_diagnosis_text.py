"""The text of a diagnosed audit: at most 15 lines for 80 layers, all findings on demand, nothing cut in silence."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvviz.audit.audit import audit_views
from kvviz.audit.causes import diagnose
from kvviz.audit.claims import Covers, Disjoint, Follows
from kvviz.audit.diagnosis_text import COLUMNS, audit_text
from kvviz.audit.findings import KINDS, Audit, Finding, FindingKind
from kvviz.audit.view import Storage, View
from kvviz.cache.buffers import allocate
from kvviz.cache.spec import CacheSpec

NUM_BLOCKS = 50_269


def carved_from_the_shape():
    """Return views and claims of 80 layers in one buffer. The scale views were computed from the shape of one layer."""
    spec = CacheSpec(80, NUM_BLOCKS, 16, 8, 128, "fp8_per_token_head")
    cache = allocate(spec, "cross-layer NHD", "meta", one_storage=True)
    carved = cache.writers(cache.carve_scales("shape"))
    data = [view for view in cache.owners() if view.role == "data"]
    claims = [Disjoint(tuple(view.name for view in group)) for group in (data, carved)]
    claims += [Follows(view.name, view.name.replace("scale", "data"), spec.data_bytes) for view in carved]
    return [*data, *carved], claims


def test_80_layers_in_15_lines():
    views, claims = carved_from_the_shape()
    result = audit_views(views, claims)
    (found,) = diagnose(views, claims, result)
    lines = audit_text(result, [found]).splitlines()
    assert len(lines) <= 15 and max(map(len, lines)) <= COLUMNS
    assert lines[0] == "not clean: one cause explains all 162 findings; option -v lists them"
    text = " ".join(" ".join(lines).split())
    for said in (
        "160 scale views were computed from the shape",
        "start at byte 128 or 17,024 and step 33,792 bytes per block",
        "must be 2,703,360 bytes (80 layers of 33,792 bytes)",
        "2 groups of 80 views share bytes",
        "layer 1 K scale [block 0, token 0, head 0] lies at byte 128 of the storage and belongs at byte 33,920.",
        "n = 0 to 79, in elements of 4 bytes, old -> new, shape stays:",
        "layer n K scale: offset 32 -> 8448 n + 32, strides (8448, 264, 33) -> (675840, 264, 33)",
        "the same claims are clean",
        "notebook 04. vLLM issue 48412 was the same kind of mistake.",
    ):
        assert said in text, said
    assert found.proved and len(found.views) == len(found.repaired) == 160 and len(found.findings) == 162
    mended = {view.name: view for view in views} | {view.name: view for view in found.repaired}
    assert audit_views(list(mended.values()), claims).clean


def test_the_document_shows_this_output():
    views, claims = carved_from_the_shape()
    result = audit_views(views, claims)
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(not clean: .*?)\n```", page, re.DOTALL)
    assert audit_text(result, diagnose(views, claims, result)).startswith(shown)


def test_the_readme_shows_a_part_of_this_output():
    views, claims = carved_from_the_shape()
    result = audit_views(views, claims)
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(not clean: .*?)\n```", page, re.DOTALL)
    printed = audit_text(result, diagnose(views, claims, result)).splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == []


def test_all_findings_in_natural_order():
    views, claims = carved_from_the_shape()
    result = audit_views(views, claims)
    text = audit_text(result, diagnose(views, claims, result), verbose=True)
    listed = re.findall(r"^(\d+)\. (?:misplaced: layer (\d+) ([KV]))?", text, re.MULTILINE)
    assert [int(number) for number, _, _ in listed] == list(range(1, 163))
    layers = [(int(layer), half) for _, layer, half in listed if layer]
    assert layers == sorted(layers) and len(layers) == 160


def test_a_finding_without_a_known_cause_is_printed():
    view = View("v", Storage("s", 3), (4,), (1,))
    result = audit_views([view])
    text = audit_text(result, diagnose([view], (), result))
    assert text.startswith(
        "not clean: 1 finding, and no known cause explains it\nout_of_bounds: v: 1 element, 1 byte of s"
    )


def test_a_new_kind_is_explained_by_its_meaning(monkeypatch):
    monkeypatch.setitem(KINDS, "twice", FindingKind("twice", "a scale is written twice"))
    view = View("v", Storage("s", 4), (4,), (1,))
    result = Audit((Finding("twice", ("v",), "s", 1, 1),), ())
    known = diagnose([view], (), result)
    assert [one.effect for one in known] == ["A scale is written twice."]
    assert "twice" in audit_text(result, known)


@pytest.mark.parametrize("verbose", [False, True])
def test_what_is_cut_is_counted(verbose):
    storage = Storage("s", 3)
    views = [View(f"v{number}", replace(storage, name=f"s{number}"), (4,), (1,)) for number in range(12)]
    result = audit_views(views)
    text = audit_text(result, diagnose(views, (), result), verbose)
    assert text.count("out_of_bounds: v") == (12 if verbose else 3)
    assert ("9 more findings: option -v prints all." in text) is not verbose


def test_a_clean_audit_begins_with_clean():
    view = View("v", Storage("s", 4), (4,), (1,))
    text = audit_text(audit_views([view]))
    assert text.startswith("clean: every claim holds.") and "holds    1 view lies within its storage" in text


def test_the_proof_does_not_claim_more_than_was_audited():
    """A repaired transfer next to a view that leaves its storage for an unknown reason."""
    storage = Storage("s", 128)
    views = [View("content", storage, (4, 24), (32, 1)), View("sent", storage, (4, 20), (32, 1))]
    stray = View("stray", Storage("t", 3), (4,), (1,))
    claims = [Covers("sent", ("content",))]
    for given, proof in ((views, "the same claims are clean"), ([*views, stray], "Other views still have findings.")):
        result = audit_views(given, claims)
        text = audit_text(result, diagnose(given, claims, result))
        assert proof in text and text.count("proof ") == 1
