"""The registry of codecs: by number for readers, by name for configurations."""

import pytest

from holdfast.codec import codec
from holdfast.codec.codec import codec_named, find_codec, register, unregister


class Toy:
    def __init__(self, number, name):
        self.number, self.name = number, name

    def encode(self, raw, into, element_bytes):
        return 0

    def decode(self, stored, into):
        into[:] = bytes(len(into))


def test_planes_is_found_by_number_and_by_name():
    assert find_codec(1) is codec_named("planes")
    assert find_codec(1).name == "planes"


def test_no_codec_has_the_number_of_raw_records_or_an_unknown_number():
    assert find_codec(0) is None
    assert find_codec(77) is None
    with pytest.raises(KeyError):
        codec_named("gzip")


def test_a_codec_is_found_from_its_registration_on_until_it_is_removed():
    toy = Toy(200, "toy")
    register(toy)
    try:
        assert find_codec(200) is codec_named("toy") is toy
    finally:
        unregister(toy)
    assert find_codec(200) is None


@pytest.mark.parametrize(
    ("number", "name", "error"),
    [(1, "other", "in use"), (9, "planes", "in use"), (0, "x", "1 and 255"), (256, "x", "255")],
)
def test_a_number_or_name_that_cannot_be_registered_is_refused(number, name, error):
    with pytest.raises(ValueError, match=error):
        codec.register(Toy(number, name))
