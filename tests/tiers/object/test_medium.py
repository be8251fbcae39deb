"""A bucket keeps the contract of media of segment tiers."""

from functools import cache

import pytest

from holdfast.testing.medium_contract import MediumContract
from holdfast.tiers.object.medium import ObjectMedium
from holdfast.tiers.object.store import open_store


class TestSeaweed(MediumContract):
    @pytest.fixture(autouse=True)
    def _side(self, seaweed, sides):
        self._side_of = cache(lambda folder: sides(seaweed, folder))

    def make_medium(self, folder):
        options = self._side_of(folder).options(deadline_s=20.0, write_s=20.0)
        return ObjectMedium(open_store(options), options, "object")


@pytest.mark.soak
class TestMoto(TestSeaweed):
    @pytest.fixture(autouse=True)
    def _side(self, moto, sides):
        self._side_of = cache(lambda folder: sides(moto, folder))


@pytest.mark.soak
class TestAzurite(TestSeaweed):
    @pytest.fixture(autouse=True)
    def _side(self, azurite, sides):
        self._side_of = cache(lambda folder: sides(azurite, folder))


@pytest.mark.soak
class TestS3rver(TestSeaweed):
    @pytest.fixture(autouse=True)
    def _side(self, s3rver, sides):
        self._side_of = cache(lambda folder: sides(s3rver, folder))
