"""10,000 random sets of views and claims against independent enumerations: kinds, counts, first places and examples.

Each account below enumerates every byte in plain Python. The other test files run a few hundred seeds of each account.
"""

import inspect

import pytest

from tests.audit import test_audit, test_blocks, test_numbers

SETS, FEW_SETS = 10_000, 1_000
"""Random sets per account. An account of several claims that share views takes ten times as long, so it gets fewer."""

ACCOUNTS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": function
    for module in (test_audit, test_blocks, test_numbers)
    for name, function in vars(module).items()
    if name.startswith("test_") and [*inspect.signature(function).parameters] == ["seed"]
}
"""Every test that compares one random set with an account: all claims, and the views alone."""


def test_every_account_is_found():
    names = " ".join(ACCOUNTS)
    for word in (
        "findings",
        "hits",
        "overlay",
        "covers",
        "same_bytes",
        "addressed",
        "aligned",
        "ids",
        "steps",
        "follow",
    ):
        assert word in names
    assert len(ACCOUNTS) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCOUNTS)
def test_10_000_random_sets_agree_with_the_account(name):
    disagreements = []
    for seed in range(FEW_SETS if "share_neighbours" in name else SETS):
        try:
            ACCOUNTS[name](seed)
        except AssertionError:
            disagreements.append(seed)
    assert disagreements == []
