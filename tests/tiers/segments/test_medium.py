"""The contract of media holds for the one in memory, which other tests build on."""

from functools import cache

import pytest

from holdfast.testing.medium_contract import MediumContract
from holdfast.testing.memory_medium import MemoryMedium, MemoryObjects
from holdfast.tiers.segments.medium import NAME


class TestMemoryMedium(MediumContract):
    objects = staticmethod(cache(lambda folder: MemoryObjects()))

    def make_medium(self, folder):
        return MemoryMedium(self.objects(folder))


@pytest.mark.parametrize("name", ["a", "7d/0a/b-1", "index/00ff/0001"])
def test_names_are_short_lower_case_paths(name):
    assert NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a.b", "A", "a" * 65])
def test_other_names_are_refused(name):
    assert not NAME.fullmatch(name)
