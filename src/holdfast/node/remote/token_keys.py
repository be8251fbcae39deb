"""The keys with which a target verifies tokens, read again when a file was replaced."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from holdfast.assemble.keys import read_key
from holdfast.config.options import TokenOptions
from holdfast.errors import ConfigError
from holdfast.regular_file import file_stamp

_log = logging.getLogger(__name__)


class TokenKeys:
    """The key of `tokens.key_file`, and that of `tokens.second_key_file` if the file exists.

    With two keys, tokens of both are accepted while the key is replaced on all machines.
    Thread-safe. Raises ConfigError if a file cannot be used at the start. Later the last usable
    keys stay.
    """

    def __init__(self, options: TokenOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._keys = self._read()

    def current(self) -> Sequence[bytes]:
        """Return the keys for a new connection."""
        with self._lock:
            if (seen := self._stamps()) != self._seen:
                self._seen = seen
                try:
                    self._keys = self._read()
                except ConfigError as error:
                    _log.warning("tokens: the keys that were read before stay in use: %s", error)
                else:
                    _log.info("tokens: keys were replaced; %d in use", len(self._keys))
            return self._keys

    def _stamps(self) -> list[tuple[int, ...]]:
        files = self._options.key_file, self._options.second_key_file
        return [file_stamp(file) for file in files]

    def _read(self) -> list[bytes]:
        options = self._options
        keys = [read_key(Path(options.key_file), "tokens.key_file")]
        if options.second_key_file and Path(options.second_key_file).exists():
            keys.append(read_key(Path(options.second_key_file), "tokens.second_key_file"))
        return keys
