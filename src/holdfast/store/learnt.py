"""What a store learnt, in a small file beside its disk tier, so that a restart knows it too.

Written whole under another name and then renamed. A file that can not be read, or says something
else, is a cold start: everything in it can be learnt again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from holdfast.store.judgement import Judgement

FILE_BYTES_MAX = 8 << 20
VERSION = 1

_log = logging.getLogger("holdfast.store")


class Learnt:
    """A judgement's memory on disk; `file` None: there is no disk, and nothing is kept."""

    def __init__(self, judgement: Judgement, file: Path | None) -> None:
        self._judgement = judgement
        self._file = file
        self._kept = judgement.changes

    def recall(self) -> None:
        """Know again what an earlier process kept; a file of another make is left behind."""
        if self._file is None or not self._file.exists():
            return
        try:
            with self._file.open("rb") as opened:
                data: Any = msgspec.json.decode(opened.read(FILE_BYTES_MAX))
            if not isinstance(data, dict) or data.get("version") != VERSION:
                raise ValueError(f"not version {VERSION}")
            self._judgement.restore(data)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            _log.warning("%s: learning speeds anew: %s", self._file, error)

    def keep(self) -> None:
        """Write what was learnt since the last time; a disk that refuses costs only this memory."""
        changes = self._judgement.changes
        if self._file is None or changes == self._kept:
            return
        made = self._file.with_name(self._file.name + ".new")
        data = msgspec.json.encode({"version": VERSION, **self._judgement.as_data()})
        try:
            fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "wb") as opened:
                opened.write(data)
            made.replace(self._file)
        except OSError as error:
            _log.warning("%s: speeds not kept: %s", self._file, error)
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
        self._kept = changes
