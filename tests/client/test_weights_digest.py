import hashlib
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import msgspec
import pytest

from holdfast.client import weights_digest
from holdfast.client.weights_digest import (
    NoDigestError,
    check_unchanged,
    files_digest,
    process_start_ns,
)
from holdfast_bench.campaigns.fuzz import mutated

PATTERN = b"w" * 1000


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "model.safetensors").write_bytes(PATTERN)
    return folder


@pytest.fixture
def memory(tmp_path):
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def unchanged(monkeypatch):
    """Take files that were made a moment ago for files that have rested."""
    monkeypatch.setattr(weights_digest, "UNCHANGED_S", 0.0)
    time.sleep(0.02)  # a tick of the file system's clock


@pytest.fixture
def reads(monkeypatch):
    """Count the files that are read."""
    counted, original = [], weights_digest._read

    def read(source):
        counted.append(source.name)
        return original(source)

    monkeypatch.setattr(weights_digest, "_read", read)
    return counted


def digest(folder, memory, reader="safetensors"):
    return files_digest(reader, folder, sorted(folder.iterdir()), memory)


def test_a_digest_depends_on_every_byte_and_on_the_reader(model, memory):
    first = digest(model, memory)
    assert digest(model, memory) == first
    (model / "config.json").write_text('{"layers": 3}')
    second = digest(model, memory)
    (model / "model.safetensors").write_bytes(b"w" * 999 + b"v")
    third = digest(model, memory)
    assert len({first, second, third, digest(model, memory, "pt")}) == 4


def test_only_the_files_that_are_named_count(model, memory):
    named = [model / "model.safetensors"]
    first = files_digest("safetensors", model, named, memory)
    (model / "pytorch_model.bin").write_bytes(b"other weights")
    assert files_digest("safetensors", model, named, memory) == first


def test_a_digest_does_not_depend_on_where_the_model_lies(model, memory, tmp_path):
    first = digest(model, memory)
    model.rename(tmp_path / "elsewhere")
    assert digest(tmp_path / "elsewhere", memory) == first


def test_a_renamed_weights_file_changes_the_digest(model, memory):
    first = digest(model, memory)
    (model / "model.safetensors").rename(model / "weights.safetensors")
    assert digest(model, memory) != first


def test_an_unchanged_file_is_not_read_again(model, memory, unchanged, reads):
    first = digest(model, memory)
    assert digest(model, memory) == first
    assert len(reads) == 2
    os.utime(model / "config.json", ns=(1, 1))
    assert digest(model, memory) == first
    assert len(reads) == 3


def test_a_file_that_changed_just_before_it_was_read_is_read_again(model, memory, reads):
    first = digest(model, memory)
    assert digest(model, memory) == first
    assert len(reads) == 4


def by_tar(file, other, scratch):
    """Extract an archive whose times are normalised, as those of image layers are."""
    archive = scratch / "layer.tar"
    source = scratch / "source" / file.name
    source.parent.mkdir()
    source.write_bytes(other)
    with tarfile.open(archive, "w") as layer:
        entry = layer.gettarinfo(source, file.name)
        entry.mtime = 0
        with source.open("rb") as data:
            layer.addfile(entry, data)
    os.utime(file, ns=(0, 0))
    yield
    subprocess.run(["tar", "-xf", archive, "-C", file.parent], check=True)
    assert file.stat().st_mtime_ns == 0


def by_rm_and_cp(file, other, scratch):
    source = scratch / "source"
    source.write_bytes(other)
    os.utime(file, ns=(5, 5))
    os.utime(source, ns=(5, 5))
    yield
    file.unlink()
    subprocess.run(["cp", "-p", source, file], check=True)


def by_cp_in_place_and_touch(file, other, scratch):
    source, times = scratch / "source", scratch / "times"
    source.write_bytes(other)
    yield
    subprocess.run(["touch", "-r", file, times], check=True)
    subprocess.run(["cp", source, file], check=True)
    subprocess.run(["touch", "-r", times, file], check=True)


def by_writing_and_utime(file, other, scratch):
    before = file.stat()
    yield
    with file.open("r+b") as there:
        there.write(other)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def by_swapping_a_link(file, other, scratch):
    """Swap a `..data` link, as Kubernetes does in a mounted volume."""
    for name, content in (("..1", file.read_bytes()), ("..2", other)):
        (file.parent / name).mkdir()
        (file.parent / name / file.name).write_bytes(content)
        os.utime(file.parent / name / file.name, ns=(5, 5))
    (file.parent / "..data").symlink_to("..1")
    file.unlink()
    file.symlink_to(Path("..data") / file.name)
    yield
    (file.parent / "..new").symlink_to("..2")
    (file.parent / "..new").rename(file.parent / "..data")


WAYS = [by_tar, by_rm_and_cp, by_cp_in_place_and_touch, by_writing_and_utime, by_swapping_a_link]


@pytest.mark.parametrize("way", WAYS)
def test_replaced_weights_of_equal_size_and_time_change_the_digest(
    way, model, memory, unchanged, tmp_path
):
    file = model / "model.safetensors"
    replacing = way(file, b"v" * len(PATTERN), tmp_path)
    next(replacing)
    time.sleep(0.02)
    first = files_digest("safetensors", model, [file], memory)
    before = file.stat()
    assert files_digest("safetensors", model, [file], memory) == first
    next(replacing, None)
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert files_digest("safetensors", model, [file], memory) != first


@pytest.mark.parametrize("field", range(5))
def test_a_file_with_another_device_inode_size_or_time_is_read_again(
    field, model, memory, unchanged, reads
):
    file = model / "model.safetensors"
    right = files_digest("safetensors", model, [file], memory)
    known = msgspec.json.decode(memory.read_bytes())
    known[str(file)]["state"][field] += 1
    known[str(file)]["digest"] = "0" * 32
    memory.write_bytes(msgspec.json.encode(known))
    assert files_digest("safetensors", model, [file], memory) == right
    assert len(reads) == 2


def test_a_clock_that_was_set_back_makes_files_be_read_again(model, memory, unchanged, reads):
    file = model / "model.safetensors"
    files_digest("safetensors", model, [file], memory)
    known = msgspec.json.decode(memory.read_bytes())
    for time_of in ("began_ns", "ended_ns"):
        known[str(file)][time_of] += 10**12
    memory.write_bytes(msgspec.json.encode(known))
    files_digest("safetensors", model, [file], memory)
    assert len(reads) == 2


def test_a_file_system_without_change_times_is_read_every_time(
    model, memory, unchanged, reads, monkeypatch
):
    assert weights_digest._keeps_change_time("/proc/self/stat")
    monkeypatch.setattr(weights_digest, "NO_CHANGE_TIME", ("",))
    assert digest(model, memory) == digest(model, memory)
    assert len(reads) == 4


def test_a_file_that_changes_while_it_is_read_has_no_digest(model, memory, monkeypatch):
    original = weights_digest._read

    def read(source):
        found = original(source)
        Path(source.name).write_bytes(b"v" * len(PATTERN))
        return found

    monkeypatch.setattr(weights_digest, "_read", read)
    with pytest.raises(NoDigestError, match=r"changed while it was read.*model_digest"):
        digest(model, memory)
    monkeypatch.undo()
    changed = digest(model, memory)
    memory.unlink()
    assert digest(model, memory) == changed


def _read_beside(model, memory, asked, answers):
    counted = []
    original, locked = weights_digest._read, weights_digest._locked_cache

    def lock(cache_file):
        asked.release()  # the time of this call is taken
        return locked(cache_file)

    def read(source):
        if not counted:  # until all four have asked
            for _ in range(4):
                asked.acquire(timeout=100)
        counted.append(source.name)
        return original(source)

    weights_digest._locked_cache, weights_digest._read = lock, read
    answers.put((digest(model, memory), len(counted)))


def test_concurrent_processes_read_each_file_once(model, memory):
    context = multiprocessing.get_context("fork")
    asked, answers = context.Semaphore(0), context.Queue()
    arguments = (model, memory, asked, answers)
    processes = [context.Process(target=_read_beside, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    assert len({each for each, _ in found}) == 1
    assert sum(counted for _, counted in found) == 2


@pytest.fixture
def hub(model):
    """A Hugging Face cache: links in a snapshot to blobs that are named by their content."""
    blobs = model.parent / "blobs"
    blobs.mkdir()
    for file in sorted(model.iterdir()):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        file.symlink_to(Path("../blobs") / blob.name)
    return model


def test_a_blob_is_read_once(hub, memory, unchanged, reads):
    first = digest(hub, memory)
    assert digest(hub, memory) == first
    assert len(reads) == 2


def extracted_by_name(cache, target):
    archive = target.with_suffix(".tar")
    subprocess.run(["tar", "--sort=name", "-C", cache, "-cf", archive, "."], check=True)
    target.mkdir()
    subprocess.run(["tar", "-C", target, "-xf", archive], check=True)


def copied_with_blobs_first(cache, target):
    target.mkdir()
    for folder in ("blobs", "model"):
        subprocess.run(["cp", "-a", cache / folder, target], check=True)


def copied_after_the_links(cache, target):
    target.mkdir()
    for folder in ("model", "blobs"):
        subprocess.run(["cp", "-a", cache / folder, target], check=True)


@pytest.mark.parametrize(
    "copied", [extracted_by_name, copied_with_blobs_first, copied_after_the_links]
)
def test_the_copy_of_a_cache_with_edited_weights_is_another_model(copied, hub, memory, tmp_path):
    first = digest(hub, memory)
    (hub / "model.safetensors").write_bytes(b"v" * len(PATTERN))  # through the link
    edited = digest(hub, memory)
    cache = tmp_path / "cache-of-hub"
    cache.mkdir()
    for folder in ("blobs", "model"):
        (tmp_path / folder).rename(cache / folder)
    copied(cache, tmp_path / "copy")
    assert digest(tmp_path / "copy" / "model", memory) == edited != first


def test_replacing_the_blobs_folder_with_an_older_one_changes_the_digest(hub, memory):
    blobs = hub.parent / "blobs"
    subprocess.run(["cp", "-a", blobs, hub.parent / "older"], check=True)
    names = {file.readlink().name for file in hub.iterdir()}
    for name in names:
        (hub.parent / "older" / name).write_bytes(b"v" * len(PATTERN))
    time.sleep(0.02)
    for file in list(hub.iterdir()):  # linked after the older blobs were written
        target = file.readlink()
        file.unlink()
        file.symlink_to(target)
    first = digest(hub, memory)
    blobs.rename(hub.parent / "newer")
    (hub.parent / "older").rename(blobs)
    assert {file.readlink().name for file in hub.iterdir()} == names
    assert digest(hub, memory) != first


def test_writing_to_a_blob_through_its_link_changes_the_digest(hub, memory, unchanged):
    first, file = digest(hub, memory), hub / "model.safetensors"
    times = file.stat()
    time.sleep(0.02)
    file.write_bytes(b"v" * len(PATTERN))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest(hub, memory) != first


def test_weights_have_one_digest_in_a_hub_cache_and_in_a_folder(model, memory, request):
    first = digest(model, memory)
    assert digest(request.getfixturevalue("hub"), memory) == first


def test_a_file_that_changed_since_the_process_started_is_refused(model):
    files = [model / "model.safetensors"]
    since_ns = time.time_ns()
    check_unchanged(model, files, since_ns)
    time.sleep(0.02)
    os.utime(files[0], ns=(1, 1))
    with pytest.raises(NoDigestError, match=r"model\.safetensors' changed after.*start the engine"):
        check_unchanged(model, files, since_ns)


def test_a_symlink_on_the_path_that_changed_since_the_start_is_refused(tmp_path):
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.bin").write_bytes(name.encode())
    (tmp_path / "indirect").symlink_to("v1")
    (tmp_path / "current").symlink_to(tmp_path / "indirect")
    folder = tmp_path / "current"
    since_ns = time.time_ns()
    check_unchanged(folder, [folder / "w.bin"], since_ns)
    time.sleep(0.02)
    (tmp_path / "new").symlink_to("v2")
    (tmp_path / "new").rename(tmp_path / "indirect")
    with pytest.raises(NoDigestError, match="indirect"):
        check_unchanged(folder, [folder / "w.bin"], since_ns)


def test_a_folder_from_which_a_file_was_removed_since_the_start_is_refused(model):
    (model / "pytorch_model.bin").write_bytes(b"v")
    time.sleep(0.02)
    since_ns = time.time_ns()
    time.sleep(0.02)
    (model / "pytorch_model.bin").unlink()
    with pytest.raises(NoDigestError, match="model' changed after"):
        check_unchanged(model, [model / "model.safetensors"], since_ns)


def test_a_hub_cache_may_be_filled_by_the_engine_itself(hub, tmp_path):
    check_unchanged(hub, sorted(hub.iterdir()), 0)
    time.sleep(0.02)
    since_ns = time.time_ns()
    time.sleep(0.02)
    (tmp_path / "blobs" / "more").write_bytes(PATTERN)
    (hub / "more.safetensors").symlink_to("../blobs/more")
    (hub / "same.safetensors").symlink_to((hub / "model.safetensors").readlink())
    check_unchanged(hub, sorted(hub.iterdir()), since_ns)
    check_unchanged(hub, [hub / "config.json"], since_ns)  # beside what the engine downloaded


@pytest.mark.parametrize("changed", ["blob", "link", "copy", "folder"])
def test_a_hub_cache_that_changed_since_the_engine_began_is_refused(changed, hub, tmp_path):
    file = hub / "model.safetensors"
    if changed == "blob":  # after the engine's own download of it
        since_ns = 0
        time.sleep(0.02)
        file.write_bytes(b"v" * len(PATTERN))
    else:
        time.sleep(0.02)
        since_ns = time.time_ns()
        check_unchanged(hub, sorted(hub.iterdir()), since_ns)
        time.sleep(0.02)
    match changed:
        case "link":
            (tmp_path / "other").symlink_to(hub)
            (hub / "new").symlink_to(tmp_path / "other" / "config.json")
            (hub / "new").rename(file)
        case "copy":
            subprocess.run(["cp", "-a", tmp_path / "blobs", tmp_path / "again"], check=True)
            subprocess.run(["cp", "-a", hub, tmp_path / "snapshot"], check=True)
            for old, new in ((tmp_path / "blobs", "again"), (hub, "snapshot")):
                old.rename(tmp_path / f"{new}.old")
                (tmp_path / new).rename(old)
        case "folder":
            (hub / "config.json").unlink()
    with pytest.raises(NoDigestError, match=r"changed after this engine's process started"):
        check_unchanged(hub, sorted(hub.iterdir()), since_ns)


def test_a_cycle_of_symlinks_raises_an_oserror(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        check_unchanged(tmp_path / "a", [tmp_path / "a"], time.time_ns())


def test_a_process_knows_when_it_started():
    before_ns = time.time_ns()
    code = (
        "import time; from holdfast.client.weights_digest import process_start_ns as s;"
        "print(s(), time.time_ns())"
    )
    started = subprocess.run(
        [sys.executable, "-c", code],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    start_ns, then_ns = map(int, started)
    assert before_ns - 50_000_000 <= start_ns < then_ns
    assert process_start_ns() < before_ns


def test_a_damaged_or_unavailable_digest_cache_causes_another_read(model, memory):
    first = digest(model, memory)
    memory.write_text("{not json")
    assert digest(model, memory) == first
    assert msgspec.json.decode(memory.read_bytes())
    assert digest(model, model / "config.json" / "no folder") == first


@pytest.mark.parametrize(
    "left", ["[]", '{"a": 1}', "{", "\x00", '{"/a:1:2:3": "old form"}', "[" * 100_000]
)
def test_an_invalid_digest_cache_causes_another_read_and_is_replaced(model, memory, left):
    first = digest(model, memory)
    memory.write_text(left)
    assert digest(model, memory) == first
    assert len(msgspec.json.decode(memory.read_bytes())) == 2


def test_the_digest_cache_is_bounded(model, memory, monkeypatch):
    monkeypatch.setattr(weights_digest, "MAX_CACHED_DIGESTS", 3)
    for number in range(5):
        (model / f"{number}.safetensors").write_bytes(bytes([number]))
    digest(model, memory)
    known = msgspec.json.decode(memory.read_bytes())
    assert sorted(Path(path).name for path in known) == [
        "4.safetensors", "config.json", "model.safetensors",
    ]  # fmt: skip


def test_a_missing_home_folder_causes_another_read(model, monkeypatch, tmp_path):
    def homeless(_):
        raise RuntimeError("Could not determine home directory.")

    first = digest(model, tmp_path / "digests.json")
    monkeypatch.setattr(weights_digest.Path, "expanduser", homeless)
    assert digest(model, None) == first


@pytest.mark.parametrize("limit", [0, 10, 100])
def test_a_full_disk_prevents_caching_and_causes_another_read(
    limit, model, memory, unchanged, reads, caplog
):
    first = digest(model, memory)
    (model / "more.safetensors").write_bytes(PATTERN)
    time.sleep(0.02)  # a tick of the file system's clock
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        second = digest(model, memory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "digests of weights are not cached" in caplog.text
    assert not memory.read_bytes()
    reads.clear()
    assert digest(model, memory) == second != first
    assert len(reads) == 3
    assert "ignored" not in caplog.text


LEFT = {
    "truncated": b'{"/a": {"state": [1, 2, 3, 4, 5], "began_ns": 1, "end',
    "nested": b"[" * 10_000 + b"]" * 10_000,
    "nested_in_an_entry": b'{"/a": ' * 10_000,
    "binary": bytes(range(256)) * 64,
    "not_utf8": b'{"/\xff": 1}',
    "lone_surrogate": b'{"/\\ud800": 1}',
    "wrong_types": b'{"/a": {"state": ["1"], "began_ns": {}, "ended_ns": [], "digest": 7}}',
    "no_digest": b'{"/a": {"state": [1, 2, 3, 4, 5], "began_ns": 1, "ended_ns": 2, "digest": "x"}}',
    "huge_number": b'{"/a": {"state": [1, 2, 3, 4, 5], "began_ns": 1' + b"0" * 9_999 + b"}}",
    "too_large_number": b'{"/a": {"state": [1, 2, 3, 4, 5], "began_ns": 1e999}}',
    "huge": b" " * (weights_digest.CACHE_BYTES_MAX + 1),
}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_an_unreadable_digest_cache_is_ignored_logged_and_replaced(
    left, model, memory, unchanged, caplog
):
    first = digest(model, memory)
    memory.write_bytes(left)
    assert digest(model, memory) == first
    assert f"{memory}: cached digests of weights are ignored" in caplog.text
    assert len(msgspec.json.decode(memory.read_bytes())) == 2


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "zeros", "full"])
def test_a_cache_path_that_is_no_regular_file_is_left_unchanged(kind, model, memory, caplog):
    first = digest(model, memory)
    memory.unlink()
    match kind:
        case "folder":
            memory.mkdir()
        case "fifo":
            os.mkfifo(memory)
        case "loop":
            memory.symlink_to(memory)
        case "zeros":
            memory.symlink_to("/dev/zero")
        case "full":
            memory.symlink_to("/dev/full")
    assert digest(model, memory) == first
    assert f"{memory}: digests of weights are not cached" in caplog.text


def test_a_damaged_digest_cache_never_yields_a_digest_it_did_not_hold(
    model, memory, unchanged, caplog
):
    """A hex digit that became another names weights that nobody has: a miss, nothing worse."""
    right = digest(model, memory)
    made, rng = memory.read_bytes(), random.Random(17)
    for _ in range(400):
        memory.write_bytes(mutated([made], rng))
        found = digest(model, memory)
        assert found == right or not digests_in(memory.read_bytes()) <= digests_in(made)
    assert "ignored" in caplog.text


def digests_in(made):
    return {entry["digest"] for entry in msgspec.json.decode(made).values()}
