"""Members in a real etcd that asks for certificates: in with the right ones, out without."""

import pytest

from holdfast.assemble.pool import etcd_options
from holdfast.errors import MembershipError
from holdfast.rig.certificates import Authority
from holdfast.testing.membership_contract import Heard, wait_for_trouble
from holdfast.tiers.pool.member_etcd import EtcdRegistration, MemberEtcd
from holdfast.tiers.pool.members import Member

A = Member(id="flash-a", address="tcp://10.0.0.1:7070")


def test_who_shows_certificates_registers_and_watches(sealed_etcd):
    _, members, files = sealed_etcd
    options = etcd_options(members + files)
    assert options.prefix == "/pool/"
    assert all(url.startswith("https://") for url in options.endpoints)
    registration, source, heard = EtcdRegistration(options, A), MemberEtcd(options), Heard()
    try:
        source.watch(heard)
        heard.until(lambda found: [member.id for member in found] == ["flash-a"])
        assert registration.trouble() == source.trouble() == ""
    finally:
        source.close()
        registration.close()


def test_who_does_not_is_trouble_with_a_reason(sealed_etcd, tmp_path):
    _, members, files = sealed_etcd
    ca = files.partition("&")[0]
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").issue("stranger")
    for words in (ca, f"{ca}&cert={stranger.cert}&key={stranger.key}", f"?ca={stranger.ca}"):
        source = MemberEtcd(etcd_options(members + words))
        source.watch(Heard())
        try:
            wait_for_trouble(source)
            assert "https://127.0.0.1" in source.trouble()
        finally:
            source.close()


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("?password=x", "password: no such parameter; ca, cert and key are files"),
        ("?cert=/a&key=/b", "name ca, the file that signs"),
        ("?ca=", "name ca, the file that signs"),
        ("?ca=/none/ca.pem&cert=/none/a.pem", "and, if it wants ours, cert and key"),
        ("?ca=/none/ca.pem", "TLS files /none/ca.pem: .* they must be PEM"),
    ],
)
def test_files_that_do_not_do_are_refused_at_start(query, words):
    with pytest.raises(MembershipError, match=words):
        etcd_options(f"etcd://127.0.0.1:2379/pool{query}")
