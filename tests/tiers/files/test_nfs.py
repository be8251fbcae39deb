"""Two clients of a real NFS server share a folder: in a guest kernel that is a process."""

import json
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("nfs_job.py")
LATE_OR_GONE = ({"late"}, {"gone"}, {"gone", "late"})


@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [
        "vers=4.2",
        "vers=4.2,lookupcache=none",
        "vers=4.2,softerr,timeo=10,retrans=1",
        "vers=3,nolock",
    ],
)
def test_two_clients_share_a_folder(run_in_guest, options):
    results = dict(json.loads(line) for line in run_in_guest(options, JOB) if line.startswith("["))
    assert results.pop("both can use it")
    assert results.pop("refusal") == ""
    assert results.pop("published and read elsewhere at once") == ["ok"]
    before, after = results.pop("listed elsewhere, though it was looked for before")
    assert (before, after) == ([], ["index/ab/1"])
    assert set(results.pop("while the server hangs")) in LATE_OR_GONE
    assert results.pop("returned in time")
    assert results.pop("used again when it is back")
    assert results.pop("written again when it is back")
    assert results.pop("when it is full") == "full"
    assert results.pop("read when it is full") == "ok"
    assert results.pop("written after deletions")
    assert set(results.pop("after the export was replaced")) <= {"gone", "late", "miss"}
    assert not results
