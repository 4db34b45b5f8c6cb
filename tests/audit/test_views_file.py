"""The views file: a written file gives the same audit, and a wrong or hostile file gives one sentence."""

import json
import random
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest

from kvviz.audit.audit import audit_scales, audit_views
from kvviz.audit.claims import BelongsAt, Claim, Covers, Declared, Disjoint, Maps
from kvviz.audit.view import Storage, View
from kvviz.audit.views_file import (
    CLAIMS,
    MAX_FILE_BYTES,
    ViewsFile,
    ViewsFileError,
    anonymous,
    dump,
    findings_json,
    load,
    read,
)
from kvviz.cache.buffers import allocate
from kvviz.cache.layout import LAYOUTS
from kvviz.cache.spec import CacheSpec

EXAMPLE = {
    "format": "kvviz-views",
    "version": 1,
    "storages": [{"name": "cache", "nbytes": 96}],
    "views": [
        {"name": "a", "storage": "cache", "dtype": "float32", "shape": [2, 3], "stride": [6, 1], "offset": 2},
        {"name": "b", "storage": "cache", "dtype": {"itemsize": 4}, "shape": [2, 3], "stride": [6, 1],
         "axes": ["block", "token"], "role": "scale"},
    ],
    "claims": [{"kind": "disjoint", "views": ["a", "b"]}],
}  # fmt: skip


def changed(path: str, value) -> str:
    """Return the example with one field changed, or removed if the value is ``...``."""
    file = json.loads(json.dumps(EXAMPLE))
    *way, last = [
        int(step) if step.isdecimal() else step for step in path.replace("[", ".").replace("]", "").split(".")
    ]
    target = file
    for step in way:
        target = target[step]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return json.dumps(file)


def caches():
    for name, layout in LAYOUTS.items():
        for carve in ("shape", "strides")[layout.packing == "packed" :]:
            cache = allocate(CacheSpec(3, 4, 2, 2, 16, "int8_per_token_head"), layout, "meta", one_storage=True)
            yield pytest.param(cache.owners(), cache.writers(cache.carve_scales(carve)), id=f"{name}-{carve}")


def test_the_example_is_read_as_it_stands():
    file = load(json.dumps(EXAMPLE))
    cache = Storage("cache", 96)
    assert file.views == (
        View("a", cache, (2, 3), (6, 1), 2, 4),
        View("b", cache, (2, 3), (6, 1), 0, 4, ("block", "token"), "scale"),
    )
    assert (file.storages, file.claims) == ((cache,), (Disjoint(("a", "b")),))
    assert file.audit().of_kind("collision")[0].bytes == 8


def random_claim(draw: random.Random, cls: type, names: list[str]) -> Claim:
    values = {}
    for part in fields(cls):
        if part.name in ("views", "content", "neighbours", "readings"):
            values[part.name] = tuple(draw.sample(names, 2))
        elif part.name in ("blocks_per_id", "table"):
            values[part.name] = tuple(draw.sample(range(-1, 9), 2))
        elif part.name in ("part", "whole", "extent"):
            values[part.name] = draw.choice((names[0], tuple(draw.sample(names, 2))))
        elif "int" in str(part.type):
            values[part.name] = draw.randint(0, 99)
        elif part.name in ("required", "strides"):
            values[part.name] = draw.random() < 0.5
        else:
            values[part.name] = "int32" if part.name == "address_type" else draw.choice(names)
    return cls(**values)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_claim_survives(seed):
    draw, storage = random.Random(seed), Storage("s", 1 << 40)
    views = tuple(
        View(f"v{n}", storage, (n, 2), (-3, draw.randint(0, 9)), 5, draw.choice((1, 2, 4)), ("x", "y"))
        for n in range(4)
    )
    claims = tuple(random_claim(draw, cls, [v.name for v in views]) for cls in get_args(Claim))
    file = ViewsFile((storage,), views, claims)
    assert len(CLAIMS) == len(get_args(Claim)) and "belongs_at" in CLAIMS and "same_bytes" in CLAIMS
    assert load(dump(file)) == file
    assert dump(load(dump(file))) == dump(file)


@pytest.mark.parametrize(("owners", "claims"), list(caches()))
def test_a_file_is_judged_as_the_views_are(owners, claims):
    homes = {view.name: view for view in owners}
    views = [view for view in owners if view.role == "data"] + list(claims)
    stated = [Disjoint(tuple(v.name for v in views)), *(BelongsAt(v.name, homes[v.name]) for v in claims)]
    file = ViewsFile.of(views, stated)
    assert load(dump(file)).audit() == audit_views(file.views, file.claims)
    direct = audit_scales(owners, claims)
    told = json.loads(findings_json(file.audit()).replace(" (rightful)", ""))["findings"]
    said = json.loads(findings_json(direct))["findings"]
    for finding in (*told, *said):
        finding["hits"].sort()
    assert told == said


def test_the_address_of_a_storage_survives():
    view = View("v", Storage("s", 64, 64, 4096), (2, 4), (8, 1))
    (record,) = json.loads(dump(ViewsFile.of([view])))["storages"]
    assert record == {"name": "s", "nbytes": 64, "address": 64, "address_modulus": 4096}
    (read_back,) = load(dump(ViewsFile.of([view]))).storages
    assert (read_back.address, read_back.address_modulus) == (64, 4096)
    (record,) = json.loads(dump(ViewsFile.of([replace(view, storage=Storage("s", 64))])))["storages"]
    assert record == {"name": "s", "nbytes": 64}


def test_a_file_without_claims_says_so():
    assert "has no claims" in str(load(changed("claims", [])).audit())
    assert "has no claims" not in str(load(json.dumps(EXAMPLE)).audit())


def test_findings_as_json():
    told = json.loads(findings_json(load(json.dumps(EXAMPLE)).audit()))
    assert (told["format"], told["version"], told["clean"]) == ("kvviz-findings", 2, False)
    assert told["findings"][0]["kind"] == "collision" and told["findings"][0]["views"] == ["a", "b"]


WRONG = [
    ("format", "other", "format: must be 'kvviz-views', not 'other'"),
    ("version", 2, "version: must be 1, not 2"),
    ("version", True, "version: must be 1, not true"),
    ("extra", 1, "the file: has no field 'extra'"),
    ("views", {}, "views: must be a list, not an object"),
    ("storages[0].nbytes", -1, "storages[0].nbytes: must be at least 0, not -1"),
    ("storages[0].nbytes", 1 << 70, "storages[0].nbytes: must be at most"),
    ("storages[0].name", "", "storages[0].name: must have 1 to 200 characters"),
    ("storages[0].address", -1, "storages[0].address: must be at least 0, not -1"),
    ("storages[0].address", 1 << 21, "storages[0]: address must be an integer from 0 to 2097151, not 2097152: give"),
    ("storages[0].address_modulus", 48, "storages[0]: address_modulus must be a power of two, not 48"),
    ("views[1]", 5, "views[1]: must be an object, not 5"),
    ("views[1].strides", [1], "views[1]: has no field 'strides'; known are name"),
    ("views[1].stride", ..., "views[1]: the field 'stride' is missing"),
    ("views[1].stride", [6], "views[1].stride: must have 2 entries like the shape, not 1"),
    ("views[1].stride[0]", "6", "views[1].stride[0]: must be an integer, not '6'"),
    ("views[1].stride[1]", float("nan"), "views[1].stride[1]: must be an integer, not nan"),
    ("views[1].stride[1]", float("inf"), "views[1].stride[1]: must be an integer, not inf"),
    ("views[1].stride[1]", 1.0, "views[1].stride[1]: must be an integer, not 1.0"),
    ("views[1].stride[1]", True, "views[1].stride[1]: must be an integer, not true"),
    ("views[1].stride[1]", None, "views[1].stride[1]: must be an integer, not null"),
    ("views[1].stride[1]", 10**18, "views[1]: shape, stride and offset reach beyond 2**62 bytes"),
    ("views[1].shape[0]", -2, "views[1].shape[0]: must be at least 0, not -2"),
    ("views[1].shape", [1] * 17, "views[1].shape: 17 entries are more than the 16"),
    ("views[1].axes", ["block"], "views[1].axes: must have 2 entries like the shape, not 1"),
    ("views[1].offset", 10**30, "views[1].offset: must be at most"),
    ("views[1].dtype", "float31", "views[1].dtype: the type 'float31' is not known"),
    ("views[1].dtype", {"itemsize": 0}, "views[1].dtype.itemsize: must be at least 1, not 0"),
    ("views[1].dtype", 4, "views[1].dtype: must be an object, not 4"),
    ("views[1].storage", "heap", "views[1].storage: no storage is named 'heap'"),
    ("views[1].name", "a", "views[1].name: 'a' is given twice; names must differ"),
    ("views[1].name", "x" * 1000, "(1000 characters)"),
    ("views[1].name", "\x1b[31mred", "views[1].name: must have printable characters only, not '\\x1b[31mred'"),
    ("views[1].name", "\ud800", "views[1].name: must have printable characters only"),
    ("views[1].role", 3, "views[1].role: must be text, not 3"),
    ("claims[0].kind", "apart", "claims[0].kind: must be one of disjoint, overlay, belongs_at"),
    ("claims[0].kind", ["disjoint"], "claims[0].kind: must be one of"),
    ("claims[0].views[1]", "c", "claims[0].views: no view is named 'c'"),
    ("claims[0].view", "c", "claims[0]: has no field 'view'"),
    ("claims[0]", {"kind": "aligned", "view": "a", "boundary_bytes": 16, "required": 1}, "claims[0].required: must be"),
    ("claims[0]", {"kind": "covers", "extent": "a"}, "claims[0]: the field 'content' is missing"),
    ("claims[0]", [], "claims[0]: must be an object, not a list"),
]


@pytest.mark.parametrize(("path", "value", "said"), WRONG)
def test_an_error_names_the_path(path, value, said):
    with pytest.raises(ViewsFileError) as caught:
        load(changed(path, value))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON: Expecting value in line 1, column 1"),
        ("[" * 90_000, "nested too deeply"),
        ('{"a":' * 50_000, "nested too deeply"),
        ("[" * 2_000_000, "more than 500000 values"),
        ("9" * 5000, "a number of 5000 digits"),
        ('{"format": 1, "format": 1}', "the file: the field 'format' is given twice"),
        ("[]", "the file: must be an object, not a list"),
        (json.dumps(EXAMPLE).replace('"offset"', '"name"'), "views[0]: the field 'name' is given twice"),
    ],
    ids=range(8),
)
def test_text_that_is_no_views_file(text, said):
    with pytest.raises(ViewsFileError) as caught:
        load(text)
    assert said in str(caught.value)


def test_a_file_too_large_is_not_read(tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ViewsFileError, match="not read"):
        read(path)


def test_a_file_that_is_no_text_and_one_with_a_mark(tmp_path):
    path = tmp_path / "f.json"
    path.write_bytes(b'{"format": "\xff"}')
    with pytest.raises(ViewsFileError, match="not UTF-8 text: see byte 12"):
        read(path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(EXAMPLE).encode())
    assert read(path) == load(json.dumps(EXAMPLE))


def test_a_rightful_view_must_have_a_name_in_the_file():
    view = View("a", Storage("s", 8), (2,), (1,))
    with pytest.raises(ValueError, match="ViewsFile.of"):
        dump(ViewsFile((view.storage,), (view,), (BelongsAt("a", replace(view, offset=4)),)))
    file = ViewsFile.of([view], [BelongsAt("a", replace(view, offset=4)), BelongsAt("a", view)])
    assert [v.name for v in file.views] == ["a", "a (rightful)"]
    assert [claim.rightful for claim in file.claims] == ["a (rightful)", "a"]


def test_anonymous_files_keep_order_and_findings():
    storage, other = Storage("secret pool", 64), Storage("secret heap", 64)
    names = ["secret.7.attn KV", "secret.7.attn K scale", "secret.3.attn KV", "secret.3.attn K scale", "secret"]
    views = [View(name, storage if n < 4 else other, (2, 4), (8, 1), n) for n, name in enumerate(names)]
    claims = [
        Disjoint(tuple(names[:4])),
        Covers(names[0], (names[1],)),
        Maps("secret table", names[2], 9),
        Declared(names[0], (names[1], names[2]), ""),
    ]
    file = ViewsFile.of(views, claims)
    hidden = anonymous(file)
    assert "secret" not in dump(hidden)
    assert [v.name for v in hidden.views] == [
        "layer 0 KV",
        "layer 0 K scale",
        "layer 1 KV",
        "layer 1 K scale",
        "layer 2",
    ]
    assert [s.name for s in hidden.storages] == ["storage 0", "storage 1"]
    assert hidden.claims[1] == Covers("layer 0 KV", ("layer 0 K scale",))
    plain, covered = file.audit().findings, hidden.audit().findings
    assert [(f.kind, f.elements, f.bytes) for f in plain] == [(f.kind, f.elements, f.bytes) for f in covered] != []


@pytest.mark.parametrize(("starts", "clean"), [((0, 64, 0, 64), True), ((0, 0, 0, 64), False)])
def test_the_claims_that_the_page_on_audits_shows(starts, clean):
    """Layers 2 and 3 may use the memory of layers 0 and 1. Layers 0 and 1 must not share a byte."""
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    views = [
        {"name": f"layer {n} KV", "storage": "pool", "dtype": "uint8", "shape": [4, 64], "stride": [128, 1]}
        | {"offset": start}
        for n, start in enumerate(starts)
    ]
    file = {"format": "kvviz-views", "version": 1, "storages": [{"name": "pool", "nbytes": 512}], "views": views}
    assert load(json.dumps(file | {"claims": json.loads(f"[{shown}]")})).audit().clean is clean
