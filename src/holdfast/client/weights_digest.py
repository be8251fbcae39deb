"""The digest of checkpoint files: a hash of their content, with a cache of the files' digests.

Content identifies a checkpoint, its name does not: other systems have served wrong KV for two
checkpoints of one name. A file's digest is cached with its path, device, inode, size, mtime and
ctime; the kernel sets ctime, and no tool can restore it. If these do not prove that the file is
unchanged, it is read again. This includes the blobs of a Hugging Face cache: their names state the
digest of what was downloaded, which a later write through a link does not change.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from holdfast.errors import HoldfastError
from holdfast.limits import MIB
from holdfast.prepared import prepared
from holdfast.regular_file import open_regular

CACHE_FILE = Path("~/.cache/holdfast/weight-digests.json")
MAX_CACHED_DIGESTS = 4_096
"""Maximum number of cached digests; those of the files read longest ago are dropped."""

CACHE_BYTES_MAX = 32 * MIB
"""Maximum size of the cache file; a larger one is ignored."""

UNCHANGED_S = 60.0
"""Age of a file's last change from which its digest is cached.

Two changes within one tick of a file system's clock have the same ctime. Writes to a mapped page
that is dirty change no time until the page is written back, by default within 35 s.
"""

SLOW_S = 5.0
"""Time to read a file from which the log suggests `model_digest`."""

NO_CHANGE_TIME = ("fuse", "9p", "cifs", "smb", "vfat", "exfat", "msdos")
"""Prefixes of the names of file systems that may have no ctime of their own."""

MOUNTS = Path("/proc/self/mountinfo")

REMEDY = "set model_digest to a name that changes whenever the weights do"

BLOBS = "blobs"
"""Folder of a Hugging Face cache with the files that the links in its snapshots lead to."""

_log = logging.getLogger(__name__)


class NoDigestError(HoldfastError):
    """No digest identifies the weights; the message gives the reason and a remedy."""


@prepared
class _CachedDigest(msgspec.Struct, frozen=True):
    """Digest and `_state` of a file that was read from `began_ns` to `ended_ns` (wall clock)."""

    state: tuple[int, int, int, int, int]
    began_ns: int
    ended_ns: int
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


_decoder = msgspec.json.Decoder(dict[str, _CachedDigest])


def files_digest(
    reader: str, folder: Path, files: Iterable[Path], cache_file: Path | None = None
) -> str:
    """Return 32 hex digits over the `reader`, and the content and path in `folder` of `files`.

    `cache_file` holds cached digests; by default `CACHE_FILE`. It is locked during the call, so
    that other processes wait for the digests and do not read the files too. Raises NoDigestError
    for a file that changes while it is read, OSError for one that cannot be read.
    """
    import xxhash

    asked_ns = time.time_ns()
    whole = xxhash.xxh3_128(f"{reader}\0".encode())
    with _locked_cache(cache_file or CACHE_FILE) as known:
        for file in sorted(files):
            digest = _file_digest(file, known, asked_ns)
            whole.update(f"{os.path.relpath(file, folder)}\0{digest}\0".encode())
    return whole.hexdigest()


def check_unchanged(folder: Path, files: Collection[Path], since_ns: int) -> None:
    """Raise NoDigestError if `files`, or links on their paths, may have changed after `since_ns`.

    An engine hashes its weights after it has loaded them, so a change since its process started may
    have happened between the two. Files that the engine itself downloaded into a Hugging Face cache
    are new, but did not change; the download also explains the change of `folder`.
    """
    old = [file for file in files if not _is_download(file, since_ns)]
    beside = folder.iterdir() if folder.is_dir() else ()
    downloads = len(old) < len(files) or any(_is_download(file, since_ns) for file in beside)
    for path in [folder, *old]:
        changed_ns = path.stat().st_ctime_ns  # raises OSError for links that lead to themselves
        links = (link for link in _links(path) if link.lstat().st_ctime_ns > since_ns)
        changed = next(links, None)  # not all of them: a changed link may lead back to itself
        if changed is None and changed_ns > since_ns and not (downloads and path == folder):
            changed = path
        if changed is not None:
            raise NoDigestError(
                f"{str(changed)!r} changed after this engine's process started, so it may "
                f"have loaded the earlier content; start the engine again, or {REMEDY}"
            )


def _is_download(file: Path, since_ns: int) -> bool:
    """Return whether `file` is a link that a download after `since_ns` made in a snapshot.

    A download writes the blob, then the link, and both have the times of the download. A copy of a
    cache restores earlier modification times, and a write to the blob is later than the link.
    """
    if not file.is_symlink() or file.readlink().parent.name != BLOBS:
        return False
    link, blob = file.lstat(), file.stat()
    existed = blob.st_ctime_ns <= since_ns
    written = blob.st_mtime_ns > since_ns and blob.st_ctime_ns <= link.st_ctime_ns
    return min(link.st_mtime_ns, link.st_ctime_ns) > since_ns and (existed or written)


def process_start_ns() -> int:
    """Return when this process started, in nanoseconds of the current wall clock."""
    # The second field is the program's name in parentheses, which may contain any character.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    ticks = int(fields.rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age_s * 1e9)


def _links(path: Path) -> Iterator[Path]:
    """Yield every symbolic link that is followed from the root to the target of `path`."""
    for step in (*reversed(path.absolute().parents), path.absolute()):
        if step.is_symlink():
            yield step
            # With the real folder, links on the way to it are not followed again.
            yield from _links(Path(os.path.realpath(step.parent)) / step.readlink())


def _file_digest(file: Path, known: dict[str, _CachedDigest], asked_ns: int) -> str:
    """Return a file's digest, from `known` if that is the digest of its content now.

    It is if the file is in the same state, and had not changed for `UNCHANGED_S` when it was read,
    or was read while this process waited for the cache.
    """
    path = os.path.realpath(file, strict=True)
    with file.open("rb", buffering=0) as source:
        state = _state(os.fstat(source.fileno()))
        entry = known.get(path)
        # A read that ended in the future means that the clock was set back; then the times prove
        # nothing.
        if entry is not None and entry.state == state and entry.ended_ns <= time.time_ns():
            was_unchanged = entry.began_ns - entry.state[4] > UNCHANGED_S * 1e9
            if (was_unchanged and _keeps_change_time(path)) or entry.ended_ns >= asked_ns:
                return entry.digest
        began_ns, start_s = time.time_ns(), time.monotonic()
        digest = _read(source)
        unchanged = state == _state(os.fstat(source.fileno())) == _state(file.stat())
    if not unchanged:
        known.pop(path, None)
        raise NoDigestError(
            f"{str(file)!r} changed while it was read; start the engine again, or {REMEDY}"
        )
    seconds = time.monotonic() - start_s
    if seconds > SLOW_S:
        _log.info(
            "read %s once to hash its weights: %.0f s; the option model_digest avoids it",
            file,
            seconds,
        )
    known[path] = _CachedDigest(state, began_ns, time.time_ns(), digest)
    return digest


def _state(found: os.stat_result) -> tuple[int, int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(source: io.FileIO) -> str:
    import xxhash

    return hashlib.file_digest(source, xxhash.xxh3_128).hexdigest()


def _keeps_change_time(path: str) -> bool:
    """Return whether the file system of a resolved path has a ctime of its own."""
    best, kind = "", "fuse"  # an unknown file system counts as one without ctime
    with contextlib.suppress(OSError), MOUNTS.open(encoding="utf-8") as mounts:
        for line in mounts:
            mount, _, rest = line.partition(" - ")
            point = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), mount.split()[4])
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, rest.split()[0]
    return not kind.startswith(NO_CHANGE_TIME)


@contextlib.contextmanager
def _locked_cache(cache_file: Path) -> Iterator[dict[str, _CachedDigest]]:
    """Lock the cache file, yield its digests by path, and write them back if they changed."""
    with contextlib.ExitStack() as opened:
        try:
            cache_file = cache_file.expanduser()
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_regular(cache_file, os.O_RDWR | os.O_CREAT)
            file = opened.enter_context(os.fdopen(descriptor, "r+b", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX)
        except (OSError, RuntimeError, ValueError) as error:
            _log.warning("%s: digests of weights are not cached: %s", cache_file, error)
            yield {}  # without a writable home, the files are read at every start
            return
        known: dict[str, _CachedDigest] = {}
        try:
            data = file.read(CACHE_BYTES_MAX + 1)
            if len(data) > CACHE_BYTES_MAX:
                raise ValueError(f"more than {CACHE_BYTES_MAX} bytes")
            known = _decoder.decode(data or b"{}")
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            _log.warning("%s: cached digests of weights are ignored: %s", cache_file, error)
        before = dict(known)
        try:
            yield known
        finally:
            if known != before:
                _write_cache(file, known, cache_file)


def _write_cache(file: io.FileIO, known: Mapping[str, _CachedDigest], cache_file: Path) -> None:
    """Replace the content of the cache file; empty it if the disk is full."""
    latest = sorted(known.items(), key=lambda item: item[1].ended_ns)[-MAX_CACHED_DIGESTS:]
    data = msgspec.json.encode(dict(latest))
    try:
        file.seek(0)
        file.truncate()
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        _log.warning("%s: digests of weights are not cached: %s", cache_file, error)
        with contextlib.suppress(OSError):
            file.truncate(0)
