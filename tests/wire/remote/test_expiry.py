"""When certificates and tokens expire, and what is said before and after."""

import datetime as dt
import subprocess
import time
from pathlib import Path

import pytest

from holdfast.wire.remote import token
from holdfast.wire.remote.credentials import Credentials
from holdfast.wire.remote.expiry import certificate_state, credential_states
from holdfast_bench.harness.certificates import Authority

NOW = dt.datetime(2027, 6, 1, 12, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def state_of(files, setting="tls.cert"):
    states = credential_states(Credentials(tls=files), NOW.timestamp())
    return {state.setting: state for state in states}[setting]


@pytest.mark.parametrize(
    ("begins", "expires", "trouble", "period", "soon"),
    [
        (-9, 90, "", "expires on 2027-08-30 12:00 UTC, in 90 days", False),
        (-81, 9, "", "expires on 2027-06-10 12:00 UTC, in 9 days", True),
        (-1, 6, "", "expires on 2027-06-07 12:00 UTC, in 6 days", False),  # lives a week
        (-5, 2, "", "expires on 2027-06-03 12:00 UTC, in 2 days", True),
        (-9, 0.5, "", "expires on 2027-06-02 00:00 UTC, in 12 hours", True),
        (-9, -3, "the certificate expired on 2027-05-29 12:00 UTC, 3 days ago; renew it", "", True),
        (2, 90, "the certificate is not valid before 2027-06-03 12:00 UTC, in 2 days", "", False),
    ],
)
def test_a_certificate_is_good_expires_soon_or_can_not_be_used(
    authority, begins, expires, trouble, period, soon
):
    files = authority.issue("node", begins=NOW + begins * DAY, expires=NOW + expires * DAY)
    state = state_of(files)
    assert state.expires_s == (NOW + expires * DAY).timestamp()
    assert state.begins_s == (NOW + begins * DAY).timestamp()
    assert state.trouble.startswith(trouble)
    assert bool(state.trouble) is bool(trouble)
    assert state.period.startswith(period)
    assert state.soon is soon
    assert not state_of(files, "tls.ca").trouble


def test_a_chain_expires_with_its_first_certificate_and_authorities_with_the_last(authority):
    long = authority.issue("long", begins=NOW - DAY, expires=NOW + 40 * DAY)
    short = authority.issue("short", begins=NOW - 9 * DAY, expires=NOW - DAY)
    both = Path(short.cert)
    both.write_bytes(Path(long.cert).read_bytes() + both.read_bytes())
    assert certificate_state("tls.cert", str(both), NOW.timestamp()).trouble
    assert not certificate_state("tls.ca", str(both), NOW.timestamp()).trouble


@pytest.mark.parametrize("extensions", [(), ("-addext", "subjectAltName=IP:127.0.0.1")])
def test_certificates_of_openssl_are_read_with_years_of_two_and_of_four_digits(
    tmp_path, extensions
):
    for days in (30, 365 * 60):
        file = tmp_path / f"{days}.crt"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a"),
                *("-keyout", tmp_path / "key", "-out", file, "-days", str(days), *extensions),
            ],
            check=True,
            capture_output=True,
        )
        state = certificate_state("tls.cert", str(file))
        assert state.expires_s - state.begins_s == days * 86_400
        assert abs(state.begins_s - time.time()) < 600


@pytest.mark.parametrize(
    "data",
    [b"", b"no certificate", b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"],
)
def test_a_file_without_a_certificate_is_reported_and_raises_no_error(tmp_path, data):
    (file := tmp_path / "x.crt").write_bytes(data)
    state = certificate_state("tls.cert", str(file))
    assert state.trouble.startswith("holds no certificate in PEM")
    assert certificate_state("tls.cert", str(tmp_path / "none")).trouble.startswith(
        "cannot be read"
    )


@pytest.mark.parametrize(
    ("lifetime_s", "later_s", "soon", "trouble"),
    [(600, 60, False, ""), (600, 500, True, ""), (60, 600, True, "the token expired on")],
)
def test_a_token_says_when_it_expires_and_what_it_permits(
    tmp_path, lifetime_s, later_s, soon, trouble
):
    now = NOW.timestamp()
    (file := tmp_path / "token").touch(mode=0o600)
    file.write_text(token.issue(b"k" * 32, "host-a", ("read",), lifetime_s, now))
    (state,) = credential_states(Credentials(token_file=str(file)), now + later_s)
    assert (state.expires_s, state.soon, state.may) == (now + lifetime_s, soon, ("read",))
    assert state.trouble.startswith(trouble)
    assert bool(state.trouble) is bool(trouble)


def test_the_expiry_date_of_a_token_from_a_wrong_clock_is_capped(tmp_path):
    (file := tmp_path / "token").touch(mode=0o600)
    file.write_text(token.issue(b"k" * 32, "host-a", ("read",), 600, (1 << 40) - 600))
    (state,) = credential_states(Credentials(token_file=str(file)))
    assert state.period.startswith("expires on 9999-12-31")
