"""The object tier keeps the contract of shared tiers on every store that tests can start."""

import pytest

from holdfast.testing.shared_tier_contract import SharedTierContract


class TestSeaweed(SharedTierContract):
    answers_locally = True

    @pytest.fixture(autouse=True)
    def _side(self, seaweed, sides):
        self.make_remote_side = lambda folder: sides(seaweed, folder)

    def make_tier(self, remote_side):
        return remote_side.open()


@pytest.mark.soak
class TestMoto(SharedTierContract):
    answers_locally = True

    @pytest.fixture(autouse=True)
    def _side(self, moto, sides):
        self.make_remote_side = lambda folder: sides(moto, folder)

    def make_tier(self, remote_side):
        return remote_side.open()


@pytest.mark.soak
class TestAzurite(SharedTierContract):
    answers_locally = True

    @pytest.fixture(autouse=True)
    def _side(self, azurite, sides):
        self.make_remote_side = lambda folder: sides(azurite, folder)

    def make_tier(self, remote_side):
        return remote_side.open()


@pytest.mark.soak
class TestS3rver(SharedTierContract):
    """It ignores conditions, which the tier does without."""

    answers_locally = True

    @pytest.fixture(autouse=True)
    def _side(self, s3rver, sides):
        self.make_remote_side = lambda folder: sides(s3rver, folder)

    def make_tier(self, remote_side):
        return remote_side.open()
