"""A bucket keeps the contract of media of segment tiers."""

from functools import cache

import pytest
from obstore.exceptions import GenericError

from holdfast.testing.medium_contract import MediumContract
from holdfast.tiers.object.medium import ObjectMedium, failure_words
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


@pytest.mark.parametrize(
    ("url", "is_lack"),
    [
        ("http://169.254.169.254/latest/api/token", True),
        ("http://metadata.google.internal/computeMetadata/v1/instance", True),
        ("https://bucket.s3.us-east-1.amazonaws.com/p", False),
    ],
)
def test_a_refused_request_for_the_machines_credentials_is_told_as_a_lack_of_them(url, is_lack):
    said = "Server returned non-2xx status code: 403 Forbidden: denied"
    error = GenericError(f"Generic S3 error: Error performing PUT {url} in 1.2ms - {said}")
    words = failure_words(error)
    assert f"403 Forbidden: denied; PUT {url}" in words
    assert words.startswith("no credentials found: name a credentials_file") is is_lack
