"""The keys of tokens follow their files while a target runs."""

import logging

import pytest

from holdfast.config.options import TokenOptions
from holdfast.errors import ConfigError
from holdfast.node.remote.token_keys import TokenKeys


@pytest.fixture
def files(tmp_path):
    """Call to replace a key file, or to remove it; returns its options."""

    def replace(**contents):
        for name, data in contents.items():
            file = tmp_path / name
            if data is None:
                file.unlink()
                continue
            (new := tmp_path / "new").touch(mode=0o600)
            new.write_bytes(data)
            new.rename(file)
        return TokenOptions(key_file=f"{tmp_path}/first", second_key_file=f"{tmp_path}/second")

    return replace


def test_a_second_token_key_is_accepted_while_its_file_exists(files):
    keys = TokenKeys(files(first=b"1" * 32))
    assert keys.current() == [b"1" * 32]
    files(second=b"2" * 32)
    assert keys.current() == [b"1" * 32, b"2" * 32]
    files(first=b"2" * 32, second=None)
    assert keys.current() == [b"2" * 32]


def test_the_last_valid_keys_stay_in_use_while_a_key_file_is_invalid(files, caplog):
    keys = TokenKeys(files(first=b"1" * 32))
    for first in (b"short", None):
        files(first=first)
        for _ in range(3):
            assert keys.current() == [b"1" * 32]
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 2
    assert "tokens.key_file: '" in caplog.text
    with pytest.raises(ConfigError, match=r"^tokens\.key_file: .* cannot be read"):
        TokenKeys(files())
