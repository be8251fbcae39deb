"""A node sees what its peers will say of its certificate."""

import datetime as dt

import msgspec
import pytest

from holdfast.wire.remote.self_check import refusal_by_hosts, refusal_by_targets
from holdfast_bench.harness.certificates import Authority


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.mark.parametrize(
    ("issued_for", "name", "words"),
    [
        ("10.0.0.7", "10.0.0.7", ""),
        ("10.0.0.7", "", ""),
        ("10.0.0.7", "10.0.0.8", "IP address mismatch, certificate is not valid for '10.0.0.8'"),
        ("a.kv.svc", "b.kv.svc", "Hostname mismatch, certificate is not valid for 'b.kv.svc'"),
    ],
)
def test_the_name_of_a_target_is_compared_with_its_certificate(authority, issued_for, name, words):
    files = authority.issue("node", issued_for)
    assert refusal_by_hosts(files, name).startswith(words)
    assert bool(refusal_by_hosts(files, name)) is bool(words)
    assert refusal_by_targets(files) == ""


def test_an_unknown_authority_and_an_expired_certificate_are_named(authority, tmp_path):
    (folder := tmp_path / "other").mkdir()
    files = msgspec.structs.replace(authority.issue("node"), ca=str(Authority(folder).file))
    assert refusal_by_hosts(files, "127.0.0.1").endswith("(unknown authority)")
    assert refusal_by_targets(files).endswith("(unknown authority)")
    past = dt.datetime.now(dt.UTC) - dt.timedelta(days=3)
    assert refusal_by_targets(authority.issue("old", expires=past)) == "certificate has expired"
