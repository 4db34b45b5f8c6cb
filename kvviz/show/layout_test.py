"""``assert_layout`` checks a layout in a test suite. If a claim is false, the test fails with the findings and a map.

``assert_layout`` accepts ``meta`` tensors, so a machine without a GPU can check a layout of any size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvviz.audit.audit import audit_views
from kvviz.audit.claims import Claim
from kvviz.audit.collect import views_of
from kvviz.audit.view import View
from kvviz.show.byte_map_text import render_text
from kvviz.show.nearby import ROW_BYTES, map_around


def assert_layout(given: Mapping[str, Any] | Sequence[View], claims: Sequence[Claim]) -> None:
    """Raise AssertionError if the audit is not clean.

    The message contains all findings, and a map of the first finding that is an error.

    Args:
        given: tensors or arrays by name, or views.
        claims: claims that must be true, for example ``[Disjoint(("layer 0 K", "layer 0 V"))]``.
    """
    views = views_of(given) if isinstance(given, Mapping) else tuple(given)
    result = audit_views(views, claims)
    if result.clean:
        return
    first = next(finding for finding in result.findings if finding.severity == "error")
    record = map_around(first, views, claims)
    raise AssertionError("\n".join([str(result), *([] if record is None else ["", render_text(record, ROW_BYTES)])]))
