"""`holdfast pool`: draining a member is one edit of the members file."""

import stat

import pytest
import yaml

from holdfast.cli import main

MEMBERS = [
    {"id": "a", "address": "tcp://10.0.0.1:7000", "weight": 4.0},
    {"id": "b", "address": "tcp://10.0.0.2:7000"},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "members.yaml"
    path.write_text(yaml.safe_dump({"members": MEMBERS}))
    return path


def states(file):
    return {m["id"]: m.get("state", "serving") for m in yaml.safe_load(file.read_text())["members"]}


def test_a_member_is_drained_and_put_back(file, capsys):
    assert main(["pool", "drain", "a", "--members", str(file)]) == 0
    assert states(file) == {"a": "draining", "b": "serving"}
    assert capsys.readouterr().out == "a: draining\n"
    assert main(["pool", "serve", "a", "--members", str(file)]) == 0
    assert states(file) == {"a": "serving", "b": "serving"}
    assert yaml.safe_load(file.read_text())["members"][0]["weight"] == 4.0


def test_the_file_is_found_in_the_configuration(file, tmp_path):
    config = tmp_path / "holdfast.yaml"
    pool = {"kind": "pool", "members": "members.yaml"}
    tiers = [{"kind": "host", "capacity": "64 MiB"}, pool]
    data = {"tiers": tiers, "domains": {"default": {"key_file": "key"}}}
    config.write_text(yaml.safe_dump(data))
    assert main(["pool", "drain", "b", "--config", str(config)]) == 0
    assert states(file)["b"] == "draining"


def test_what_cannot_be_is_refused_and_changes_nothing(file, capsys):
    before = file.read_text()
    assert main(["pool", "drain", "z", "--members", str(file)]) == 2
    assert "no member 'z'; known: a, b" in capsys.readouterr().err
    assert file.read_text() == before
    main(["pool", "drain", "a", "--members", str(file)])
    assert main(["pool", "drain", "b", "--members", str(file)]) == 2
    assert "the last one that takes segments" in capsys.readouterr().err
    assert states(file)["b"] == "serving"


def test_a_link_stays_a_link_and_the_file_keeps_its_mode(file, tmp_path, capsys):
    link = tmp_path / "links" / "members.yaml"
    link.parent.mkdir()
    link.symlink_to(file)
    file.chmod(0o640)
    assert main(["pool", "drain", "a", "--members", str(link)]) == 0
    assert (link.is_symlink(), file.is_symlink()) == (True, False)
    assert states(file) == {"a": "draining", "b": "serving"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [path.name for path in link.parent.iterdir()] == ["members.yaml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["links", "members.yaml"]
