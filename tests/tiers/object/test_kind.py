"""The options of an object tier: what is accepted, refused, and shown by doctor."""

import pytest

from holdfast.byte_size import Size
from holdfast.config.read import parse
from holdfast.errors import ConfigError
from holdfast.tiers.kind import TierContext
from holdfast.tiers.object.kind import ObjectOptions, check_object, examine_object, open_object

CONTEXT = TierContext("tiers.1", "object", 512)


def given(**options):
    sizes = {"capacity": Size.of(options.pop("capacity", 0))}
    return ObjectOptions(**{"url": "s3://bucket/prefix", **options, **sizes})


def test_a_configuration_names_an_object_tier():
    tiers = [{"kind": "host", "capacity": "1 GiB"}, {"kind": "object", "url": "gs://b/p"}]
    domains = {"default": {"key_file": "/etc/holdfast/key"}}
    config = parse({"listen": "unix:///tmp/x.sock", "tiers": tiers, "domains": domains})
    assert config.tiers[1] == ObjectOptions(url="gs://b/p")


@pytest.mark.parametrize("url", ["s3://b", "s3://b/p/q", "az://container/p", "gs://b/p"])
def test_urls_of_the_three_clouds_are_accepted(url):
    check_object(given(url=url), "tiers.1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "b"}, "url: it is not s3://BUCKET"),
        ({"url": "file:///tmp"}, "url: it is not s3://BUCKET"),
        ({"url": "s3://key:secret@bucket/p"}, "url: it contains credentials"),
        ({"url": "s3://b/p?sig=secret"}, "url: it is not s3"),
        ({"endpoint": "https://key:secret@host"}, "endpoint: it contains credentials"),
        ({"endpoint": "host:9000"}, "endpoint: 'host:9000' is not http"),
        ({"deadline_s": 0}, "deadline_s: 0 s is not above 0"),
        ({"write_s": 1e4}, "write_s: 10,000 s is not above 0 and at most 600"),
        ({"poll_s": 0.1}, "poll_s: 0.1 s is less than 1 s"),
        ({"connections": 0}, "connections: 0 is not from 1 to 256"),
        ({"capacity": "1 MiB"}, "capacity: 1 MiB is less than 256 MiB"),
    ],
)
def test_bad_options_are_refused_with_the_remedy_and_without_secrets(options, words):
    with pytest.raises(ConfigError) as caught:
        check_object(given(**options), "tiers.1")
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "no equals sign\n", "secret_key: abc\n"])
def test_an_unusable_credentials_file_is_refused_without_its_content(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="credentials_file") as caught:
        open_object(given(credentials_file=str(file)), CONTEXT)
    assert "abc" not in str(caught.value)


def test_a_missing_credentials_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tiers\.1\.credentials_file: .* cannot be read"):
        open_object(given(credentials_file=str(tmp_path / "none")), CONTEXT)


def findings(options):
    return list(examine_object(options, CONTEXT))


def test_doctor_shows_what_a_store_does(side):
    found = findings(side.options())
    assert [each.ok for each in found] == [True] * 4
    assert "can be read and written" in found[0].why
    assert [each.what.split(" ", 1)[1] for each in found[1:]] == [
        "ranges",
        "create if absent",
        "replace if ETag matches",
    ]
    assert side.names() == []


@pytest.mark.soak
def test_a_real_store_that_answers_ranges_with_whole_objects_is_refused(rclone, sides):
    [found, *_] = findings(sides(rclone).options())
    assert found.ok is False
    assert "does not serve ranges of objects" in found.why


@pytest.mark.soak
def test_doctor_shows_which_conditions_a_real_store_ignores(s3rver, sides):
    found = findings(sides(s3rver).options())
    assert [each.ok for each in found] == [True, True, None, None]
    assert {each.found for each in found[2:]} == {"ignored by the store"}


def test_doctor_names_a_bucket_that_does_not_exist_and_creates_none(side):
    for _ in range(2):
        url = f"{side.scheme}://misspelt/prefix"
        [found] = findings(side.options(url=url))
        assert found.ok is False
        assert f"there is no bucket of {url}; create it" in found.why


def test_doctor_names_wrong_keys(seaweed, sides, tmp_path):
    side = sides(seaweed)
    side.credentials.write_text("access_key_id = other\nsecret_access_key = hidden-secret\n")
    [found] = findings(side.options())
    assert found.ok is False
    assert "403" in found.why
    assert "hidden-secret" not in found.why


def test_doctor_names_a_store_that_does_not_answer(side):
    side.kill()
    [found] = findings(side.options())
    assert found.ok is False
    assert found.why.endswith("start it, or correct url, endpoint or keys")
