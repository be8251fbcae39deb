"""Members in a real etcd that asks for certificates: in with the right ones, out without."""

import pytest

from holdfast.errors import MembershipError
from holdfast.membership.etcd_source import EtcdRegistration, EtcdSource
from holdfast.membership.members import Member
from holdfast.membership.open_source import etcd_options
from holdfast.testing.membership_contract import ReportedViews, wait_for_trouble
from holdfast_bench.harness.certificates import Authority

A = Member(id="flash-a", address="tcp://10.0.0.1:7070")


def test_a_client_with_valid_certificates_registers_and_watches(sealed_etcd):
    _, members, files = sealed_etcd
    options = etcd_options(members + files)
    assert options.prefix == "/pool/"
    assert all(url.startswith("https://") for url in options.endpoints)
    registration, source, heard = EtcdRegistration(options, A), EtcdSource(options), ReportedViews()
    try:
        source.watch(heard)
        heard.until(lambda found: [member.id for member in found] == ["flash-a"])
        assert registration.trouble() == source.trouble() == ""
    finally:
        source.close()
        registration.close()


def test_a_client_without_valid_certificates_reports_trouble(sealed_etcd, tmp_path):
    _, members, files = sealed_etcd
    ca = files.partition("&")[0]
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").issue("stranger")
    for words in (ca, f"{ca}&cert={stranger.cert}&key={stranger.key}", f"?ca={stranger.ca}"):
        source = EtcdSource(etcd_options(members + words))
        source.watch(ReportedViews())
        try:
            wait_for_trouble(source)
            assert "https://127.0.0.1" in source.trouble()
        finally:
            source.close()


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("?password=x", "password: unknown parameter; ca, cert and key are files"),
        ("?cert=/a&key=/b", "name ca, the file with the CA of"),
        ("?ca=", "name ca, the file with the CA of"),
        ("?ca=/none/ca.pem&cert=/none/a.pem", "if it requires client certificates, cert and key"),
        ("?ca=/none/ca.pem", "TLS files /none/ca.pem: .* they must be PEM"),
    ],
)
def test_invalid_tls_parameters_are_refused_at_start(query, words):
    with pytest.raises(MembershipError, match=words):
        etcd_options(f"etcd://127.0.0.1:2379/pool{query}")
