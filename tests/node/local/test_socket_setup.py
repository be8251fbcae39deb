"""The node's Unix socket: what keeps it from being made is a configuration error."""

import pytest

from holdfast.errors import ConfigError
from holdfast.node.local.socket_setup import socket_setup


def test_a_lock_file_that_cannot_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "node.sock.lock").mkdir()
    told = r'listen: socket ".*/node\.sock" cannot be made: Is a directory; choose a folder that'
    with pytest.raises(ConfigError, match=told), socket_setup(f"unix://{tmp_path}/node.sock"):
        pass
