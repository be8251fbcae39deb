"""The contract of membership sources finds a source that breaks a promise."""

from types import SimpleNamespace

import pytest

from holdfast.testing.membership_contract import MembershipContract, ReportedViews


def test_a_source_whose_first_list_is_incomplete_breaks_the_contract():
    contract, heard = MembershipContract(), ReportedViews()
    source = SimpleNamespace(trouble=lambda: "")
    one, two = contract.member(1), contract.member(2)
    heard([one, two])
    contract.test_the_whole_list_is_told_at_first(source, heard)
    heard.lists.insert(0, (one,))
    with pytest.raises(AssertionError):
        contract.test_the_whole_list_is_told_at_first(source, heard)
