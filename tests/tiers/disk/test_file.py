"""The disk tier's file is created once; a foreign file is refused by name and not changed."""

import re

import pytest

from holdfast.errors import BusyError, ConfigError, FormatError
from holdfast.limits import MIB
from holdfast.tiers.disk.file import DiskConfig, check_file
from holdfast.tiers.disk.kind import FILE_NAME
from holdfast.tiers.disk.region import REGIONS_MAX
from holdfast.tiers.disk.tier import DiskTier


def config_for(folder, **changes):
    options = {"path": str(folder), "capacity_bytes": 8 * MIB, "setting": "tiers.1"}
    return DiskConfig(**options | changes)


def refused(folder, error, **changes):
    """Return the error message of opening a tier; check that no file changed."""
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
    with pytest.raises(error) as caught:
        DiskTier(config_for(folder, **changes))
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
    assert after == before
    return str(caught.value)


@pytest.fixture
def made(tmp_path):
    """A folder with a formatted file."""
    DiskTier(config_for(tmp_path)).close()
    return tmp_path


def test_the_file_is_preallocated_and_within_its_capacity(tmp_path):
    tier = DiskTier(config_for(tmp_path / "new" / "folder"))
    stat = (tmp_path / "new" / "folder" / FILE_NAME).stat()
    assert stat.st_size <= 8 * MIB
    assert stat.st_blocks * 512 >= stat.st_size
    assert tier.usage().capacity_bytes >= 6 * MIB
    tier.close()


def test_a_foreign_file_is_refused_by_name(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"some photograph" * 10_000)
    message = refused(tmp_path, FormatError)
    assert str(tmp_path / FILE_NAME) in message
    assert "some pho" in message
    assert "move it away" in message


@pytest.mark.parametrize("nbytes", [0, 100, 4096])
def test_a_file_without_room_for_superblocks_is_refused(tmp_path, nbytes):
    (tmp_path / FILE_NAME).write_bytes(bytes(nbytes))
    assert str(tmp_path / FILE_NAME) in refused(tmp_path, FormatError)


def test_another_version_is_refused_by_name(made):
    path = made / FILE_NAME
    image = bytearray(path.read_bytes())
    image[8] = image[4096 + 8] = 2
    path.write_bytes(image)
    assert "format 2, this build reads 1" in refused(made, FormatError)


def test_two_damaged_superblocks_are_refused(made):
    path = made / FILE_NAME
    image = bytearray(path.read_bytes())
    image[20] ^= 1
    image[4096 + 20] ^= 1
    path.write_bytes(image)
    assert "fails the CRC" in refused(made, FormatError)


@pytest.mark.parametrize("which", [0, 1])
def test_one_superblock_is_enough(made, which):
    path = made / FILE_NAME
    image = bytearray(path.read_bytes())
    image[4096 * which : 4096 * which + 4096] = bytes(4096)
    path.write_bytes(image)
    DiskTier(config_for(made)).close()


def test_a_truncated_file_is_refused(made):
    path = made / FILE_NAME
    path.write_bytes(path.read_bytes()[: 4 * MIB])
    assert "truncated" in refused(made, FormatError)


def test_a_changed_capacity_is_refused_with_the_remedy(made):
    for name, changes in (
        ("capacity", {"capacity_bytes": 16 * MIB}),
        ("region", {"region_bytes": 2 * MIB}),
        ("capacity", {"capacity_bytes": 16 * MIB, "region_bytes": 2 * MIB}),
    ):
        message = refused(made, ConfigError, **changes)
        assert message.startswith(f"tiers.1.{name}: ")
        assert "or delete the file and lose its blocks" in message
        set_back = re.findall(r"tiers\.1\.(\w+) to (\d+)", message)
        changes.update({f"{key}_bytes": int(value) for key, value in set_back})
        DiskTier(config_for(made, **changes)).close()


def test_a_file_can_be_checked_while_a_node_has_it_open(made):
    was = (made / FILE_NAME).read_bytes()
    held = DiskTier(config_for(made))
    check_file(config_for(made))
    with pytest.raises(ConfigError, match=r"set tiers\.1\.capacity to \d+, or delete the file"):
        check_file(config_for(made, capacity_bytes=16 * MIB))
    held.close()
    (made / FILE_NAME).write_bytes(was[:MIB])
    with pytest.raises(FormatError, match="truncated"):
        check_file(config_for(made))
    check_file(config_for(made / "none"))
    with pytest.raises(ConfigError, match=r"tiers\.1\.capacity is 8388608 bytes, less than one"):
        check_file(config_for(made / "none", region_bytes=64 * MIB))
    assert not (made / "none").exists()


def test_less_than_one_region_is_refused(tmp_path):
    message = refused(tmp_path, ConfigError, region_bytes=64 * MIB)
    assert message.startswith("tiers.1.capacity is 8388608 bytes, less than one region")
    assert "raise it to" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"region_bytes": 5_000}, "tiers.1.region is 5000"),
        ({"region_bytes": 4096}, "tiers.1.region is 4096"),
    ],
)
def test_options_out_of_range_name_value_and_limit(tmp_path, changes, expected):
    assert expected in refused(tmp_path, ConfigError, **changes)


def test_too_many_regions_are_refused_and_the_named_size_is_enough(tmp_path):
    sizes = {"capacity_bytes": 4 << 40, "region_bytes": 32 << 10}
    message = refused(tmp_path, ConfigError, **sizes)
    assert "tiers.1.region is 32768 bytes" in message
    assert f"{4 << 25} regions, more than {REGIONS_MAX}" in message
    enough = int(re.search(r"raise it to (\d+) bytes", message)[1])
    check_file(config_for(tmp_path / "none", **sizes | {"region_bytes": enough}))


def test_a_second_tier_on_one_folder_is_refused_and_the_first_still_works(tmp_path):
    first = DiskTier(config_for(tmp_path))
    with pytest.raises(BusyError, match="in use by process"):
        DiskTier(config_for(tmp_path))
    assert first.reserve([4096]).places != [-1]
    first.close()
    DiskTier(config_for(tmp_path)).close()


def test_a_refused_file_is_unlocked(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"x" * 10_000)
    refused(tmp_path, FormatError)
    (tmp_path / FILE_NAME).unlink()
    DiskTier(config_for(tmp_path)).close()
