"""Files that a node shows or believes: what is wrong is said with name and remedy."""

import os

import msgspec
import pytest

from holdfast.errors import ConfigError
from holdfast.wire.remote import token
from holdfast.wire.remote.credentials import Credentials, client_context
from holdfast_bench.harness.certificates import Authority

LINE = token.issue(b"k" * 32, "host-a", ("read",), 600, 1_800_000_000.0)


@pytest.fixture
def written(tmp_path):
    """Call to write a token file; returns its path."""

    def write(data, mode=0o600):
        file = tmp_path / "token"
        file.write_bytes(data)
        file.chmod(mode)
        return str(file)

    return write


def test_a_token_file_is_read_anew_for_every_connection(written):
    shown = Credentials(token_file=written(LINE.encode() + b"\n"))
    assert shown.token() == token.read(LINE)
    renewed = token.issue(b"k" * 32, "host-b", ("read",), 600, 1_800_000_000.0)
    written(renewed.encode())
    assert shown.token() == token.read(renewed)
    assert Credentials().token() is None


@pytest.mark.parametrize(
    ("data", "mode", "words"),
    [
        (LINE.encode(), 0o640, "is open to other users; chmod 600 it"),
        (LINE.encode(), 0o604, "is open to other users; chmod 600 it"),
        (b"", 0o600, "holds no token but 0 other bytes; make one with `holdfast token`"),
        (b"5ec2e7" * 10, 0o600, "holds no token but 60 other bytes; make one"),
        (b"\xff" * 32, 0o600, "holds no token but 32 other bytes; make one"),
        (LINE.encode() * 99, 0o600, r"has more than \d+ bytes; name another file"),
    ],
)
def test_a_token_file_that_can_not_be_used_is_named(written, data, mode, words):
    file = written(data, mode)
    with pytest.raises(ConfigError, match=f"^token file '{file}' {words}") as refused:
        Credentials(token_file=file).token()
    assert "5ec2e7" not in str(refused.value), "it may be a key that was taken for a token"


def test_a_token_file_that_is_missing_or_not_regular_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for file, words in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
    ):
        told = rf"^token file '{file}' cannot be read: {words}.*; name a file that is there"
        with pytest.raises(ConfigError, match=told):
            Credentials(token_file=str(file)).token()


def test_certificates_that_can_not_be_used_are_named_with_a_remedy(tmp_path):
    files = Authority(tmp_path).issue("peer")
    (empty := tmp_path / "empty.pem").touch(mode=0o600)
    with pytest.raises(ConfigError, match=r"tls\.ca: '.*empty\.pem' holds no .*; name the CA file"):
        client_context(msgspec.structs.replace(files, ca=str(empty)))
    with pytest.raises(ConfigError, match=r"tls\.cert, tls\.key: .*; name a pair"):
        client_context(msgspec.structs.replace(files, cert=str(tmp_path / "none")))
