"""What `holdfast doctor` says about a shared folder."""

import msgspec
import pytest

from holdfast.tiers.files.findings import probe_findings, refusal
from holdfast.tiers.files.folder_probe import KEPT, examine_folder, probe_folder
from holdfast.tiers.files.requests import FolderReport
from holdfast.tiers.files.shared_folder import SharedFolder

GOOD = FolderReport(
    filesystem="nfs4",
    source="10.0.0.1:/export",
    mount_point="/mnt/shared",
    options="rw,noatime,vers=4.2,hard,nconnect=4,rsize=1048576",
    is_local=False,
    free_bytes=3 << 40,
    total_bytes=4 << 40,
    tried=8,
    not_published=0,
    rename_over=KEPT,
    exclusive_create=KEPT,
    lock=KEPT,
    attributes="not supported (ENOTSUP)",
    host_name="gpu-7",
    same_host_name=0,
)


def findings(**changed):
    return probe_findings(msgspec.structs.replace(GOOD, **changed))


def test_the_mount_and_the_options_that_matter_are_named():
    [mount, space, *rest] = findings()
    assert mount.found == "nfs4 from 10.0.0.1:/export at /mnt/shared, vers=4.2 hard nconnect=4"
    assert "3 TiB of 4 TiB" in space.found
    assert all(finding.ok for finding in rest)


def test_promises_that_the_tier_does_without_are_no_reason_to_refuse():
    broken = {"exclusive_create": "3 of 5 names were created twice", "lock": "granted twice"}
    assert refusal("/mnt", msgspec.structs.replace(GOOD, **broken)) == ""
    told = [each for each in findings(**broken) if "twice" in each.found]
    assert [(each.what, each.ok) for each in told] == [
        ("exclusive creation", True),
        ("locks", True),
    ]
    assert {each.why for each in told} == {"the tier does without it"}


def test_a_file_system_that_never_publishes_whole_files_is_refused():
    bad = msgspec.structs.replace(GOOD, not_published=8)
    assert "8 of 8 files were not whole" in refusal("/mnt/shared", bad)
    assert [each.ok for each in findings(not_published=8)].count(False) == 1
    assert [each.warning for each in findings(not_published=3)].count(True) == 1


def test_a_local_folder_and_a_shared_host_name_are_warnings():
    assert findings(is_local=True, filesystem="ext4")[0].warning
    assert findings(same_host_name=2)[-1].warning
    assert "is also that of 2 other machines" in findings(same_host_name=2)[-1].found


@pytest.mark.parametrize("probe", [probe_folder, examine_folder])
def test_a_probe_of_a_local_folder_finds_every_promise_kept(tmp_path, probe):
    report = probe(SharedFolder(str(tmp_path / "shared"), "", "ab12"), "ab12")
    kept = (report.rename_over, report.exclusive_create, report.lock)
    assert kept == (KEPT,) * 3
    assert report.not_published == 0
    assert report.total_bytes >= report.free_bytes > 0
    assert not list(tmp_path.rglob(".probe-*"))


def test_a_folder_that_a_tier_cannot_make_is_not_examined(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="no such folder: is it mounted"):
        examine_folder(SharedFolder(str(tmp_path / "absent/shared"), "", "ab12"), "ab12")
    for path in ("file", "file/shared"):
        with pytest.raises(OSError, match=r"file, not a folder; name another path: .*file'"):
            examine_folder(SharedFolder(str(tmp_path / path), "", "ab12"), "ab12")
    with pytest.raises(OSError, match="not nfs4: is it mounted"):
        examine_folder(SharedFolder(str(tmp_path), "nfs4", "ab12"), "ab12")
