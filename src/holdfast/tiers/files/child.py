"""The process that makes all calls on one shared folder.

A hung server blocks a call for as long as it hangs, and a process with a blocked call cannot end.
So these calls are made here (`tiers/child_process.py`), and the tier can leave this process behind.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable

import msgspec

from holdfast.tiers.child_serving import Answerer, serve_lanes
from holdfast.tiers.files.folder_probe import examine_folder, probe_folder
from holdfast.tiers.files.requests import (
    REQUESTS,
    DeleteNames,
    ExamineFolder,
    FolderAnswer,
    FolderRequest,
    FolderSettings,
    ListNames,
    MoreNames,
    ProbeFolder,
    Publish,
    ReadPiece,
    WritePiece,
)
from holdfast.tiers.files.shared_folder import FolderDraft, FolderReader, SharedFolder


class FolderLane:
    """Answers the requests of one lane: it has at most one open file and one temporary file."""

    def __init__(self, folder: SharedFolder, memory: memoryview, process: str) -> None:
        self._folder = folder
        self._memory = memory
        self._process = process
        self._reader = FolderReader(folder)
        self._draft = FolderDraft(folder)
        self._listing = b""

    def answer(self, message: bytes) -> bytes:
        """Return the answer to a request: an error of the file system is a code."""
        try:
            answer = self._act(REQUESTS.decode(message))
        except OSError as error:
            code = error.errno or errno.EIO
            answer = FolderAnswer(-code, f"{errno.errorcode.get(code, code)}: {error}")
        return msgspec.msgpack.encode(answer)

    def _act(self, request: FolderRequest) -> FolderAnswer:
        if not isinstance(request, ReadPiece):
            self._reader.close()
        if not isinstance(request, WritePiece | Publish):
            self._draft.discard()
        match request:
            case ReadPiece(name, start, nbytes, at, ahead):
                into = self._memory[at : at + nbytes]
                return FolderAnswer(self._reader.read(name, start, into, ahead))
            case WritePiece(name, start, nbytes, at):
                self._draft.write(name, start, self._memory[at : at + nbytes])
                return FolderAnswer(nbytes)
            case Publish(name):
                self._draft.publish(name)
                return FolderAnswer(0)
            case ListNames(prefix, at, nbytes):
                self._listing = "\n".join(self._folder.list_names(prefix)).encode()
                return self._list(0, at, nbytes)
            case MoreNames(start, at, nbytes):
                return self._list(start, at, nbytes)
            case DeleteNames(names):
                self._folder.check_root()
                for name in names:
                    self._folder.delete(name)
                return FolderAnswer(0)
            case ExamineFolder():
                return FolderAnswer(0, report=examine_folder(self._folder, self._process))
            case ProbeFolder():
                return FolderAnswer(0, report=probe_folder(self._folder, self._process))

    def _list(self, start: int, at: int, nbytes: int) -> FolderAnswer:
        part = self._listing[start : start + nbytes]
        self._memory[at : at + len(part)] = part
        return FolderAnswer(len(self._listing))


def begin(text: str, memory: mmap.mmap) -> Callable[[], Answerer]:
    """Return what makes the answerer of a lane; touches no file of the shared folder."""
    os.chdir("/")
    settings = msgspec.json.decode(text, type=FolderSettings)
    folder = SharedFolder(settings.path, settings.filesystem, settings.process)
    return lambda: FolderLane(folder, memoryview(memory), settings.process).answer


if __name__ == "__main__":
    sys.exit(serve_lanes(sys.argv[1:], begin))
