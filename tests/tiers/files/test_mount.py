"""The mount of a path is found in the kernel's table."""

from holdfast.tiers.files.mount import Mount, find_mount

TABLE = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /mnt/shared rw,noatime shared:5 - nfs4 10.0.0.1:/export rw,vers=4.2,hard
31 22 0:41 / /mnt/with\040space ro - tmpfs tmp\011fs ro
32 30 0:42 / /mnt/shared rw - fuse.juicefs JuiceFS:x rw
"""[1:]


def test_the_longest_mount_point_above_a_path_holds_it():
    assert find_mount("/mnt/sharedother", TABLE).mount_point == "/"
    assert find_mount("/", TABLE) == Mount("/", "ext4", "/dev/vda", "rw,relatime,rw")
    with_space = find_mount("/mnt/with space/folder", TABLE)
    assert with_space == Mount("/mnt/with space", "tmpfs", "tmp\tfs", "ro,ro")
    assert with_space.is_local


def test_the_last_mount_at_a_point_covers_the_others():
    assert find_mount("/mnt/shared/holdfast", TABLE).filesystem == "fuse.juicefs"
    earlier = find_mount("/mnt/shared", TABLE.rpartition("32 ")[0])
    assert earlier.options == "rw,noatime,rw,vers=4.2,hard"
    assert not earlier.is_local


def test_this_process_has_a_root():
    assert find_mount("/proc/self").filesystem == "proc"
