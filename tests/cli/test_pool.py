"""`holdfast pool`: draining a member is one edit of the members file."""

import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from holdfast.cli import main, pool
from holdfast.membership.file_source import FileSource
from holdfast.regular_file import locked_beside

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


def test_drain_and_serve_change_the_state_of_a_member(file, capsys):
    assert main(["pool", "drain", "a", "--members", str(file)]) == 0
    assert states(file) == {"a": "draining", "b": "serving"}
    assert capsys.readouterr().out == "a: draining\n"
    assert main(["pool", "serve", "a", "--members", str(file)]) == 0
    assert states(file) == {"a": "serving", "b": "serving"}
    assert yaml.safe_load(file.read_text())["members"][0]["weight"] == 4.0


BLOCK_STYLE = """\
# Rack 4; ask Kim before a change.
members:
  - id: a   # the old one
    address: "tcp://10.0.0.1:7000"  # 25 GbE

  - address: tcp://10.0.0.2:7000
    id: b
# end
"""
FLOW_STYLE = """\
members:
  - {id: a, address: "tcp://10.0.0.1:7000"}  # the old one
  - {id: b, state: serving, address: "tcp://10.0.0.2:7000"}
"""
JSON_LIST = """\
{"members": [
  {"id": "a", "address": "tcp://10.0.0.1:7000"},
  {"id": "b", "address": "tcp://10.0.0.2:7000"}
]}
"""
NO_LAST_NEWLINE = """\
members:
- id: b
  address: tcp://10.0.0.2:7000
- id: a
  address: tcp://10.0.0.1:7000 # the old one"""


@pytest.mark.parametrize(
    ("text", "last", "drained"),
    [
        (BLOCK_STYLE, "# 25 GbE", "# 25 GbE\n    state: draining"),
        (FLOW_STYLE, '1:7000"', '1:7000", state: draining'),
        (JSON_LIST, '1:7000"', '1:7000", "state": "draining"'),
        (NO_LAST_NEWLINE, "old one", "old one\n  state: draining"),
    ],
    ids=["block style", "flow style", "JSON", "no newline at the end"],
)
def test_drain_and_serve_keep_everything_else_of_the_file(file, text, last, drained):
    file.write_text(text)
    assert main(["pool", "drain", "a", "--members", str(file)]) == 0
    assert file.read_text() == (after := text.replace(last, drained))
    assert main(["pool", "serve", "a", "--members", str(file)]) == 0
    assert file.read_text() == after.replace("draining", "serving")


def test_a_member_that_shares_its_state_with_others_alone_is_drained(file):
    file.write_text(
        "members:\n- {id: a, address: 'tcp://10.0.0.1:7000', state: &state serving}\n"
        "- {id: b, address: 'tcp://10.0.0.2:7000', state: *state}\n"
    )
    assert main(["pool", "drain", "b", "--members", str(file)]) == 0
    assert states(file) == {"a": "serving", "b": "draining"}


def test_the_member_file_is_found_in_the_configuration(file, tmp_path):
    config = tmp_path / "holdfast.yaml"
    pool = {"kind": "pool", "members": "members.yaml"}
    tiers = [{"kind": "host", "capacity": "64 MiB"}, pool]
    data = {"tiers": tiers, "domains": {"default": {"key_file": "key"}}}
    config.write_text(yaml.safe_dump(data))
    assert main(["pool", "drain", "b", "--config", str(config)]) == 0
    assert states(file)["b"] == "draining"


def test_an_invalid_drain_is_refused_and_changes_nothing(file, capsys):
    before = file.read_text()
    assert main(["pool", "drain", "z", "--members", str(file)]) == 2
    assert "no member 'z'; known: a, b" in capsys.readouterr().err
    assert file.read_text() == before
    main(["pool", "drain", "a", "--members", str(file)])
    assert main(["pool", "drain", "b", "--members", str(file)]) == 2
    assert "the last one that takes segments" in capsys.readouterr().err
    assert states(file)["b"] == "serving"
    file.write_text("members: []\n")
    assert main(["pool", "drain", "a", "--members", str(file)]) == 2
    assert "no member 'a'; the list is empty" in capsys.readouterr().err
    assert main(["pool", "drain", "a", "--members", f"{file}.gone"]) == 2
    assert "No such file or directory; name the members file" in capsys.readouterr().err


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
    names = [path.name for path in tmp_path.iterdir()]
    assert sorted(names) == ["links", "members.yaml", "members.yaml.lock"]


def test_commands_at_once_all_take_effect(tmp_path, monkeypatch):
    names = [f"flash-{number}" for number in range(6)]
    members = [{"id": name, "address": f"tcp://{name}:7441"} for name in [*names, "last"]]
    (file := tmp_path / "members.yaml").write_text(yaml.safe_dump({"members": members}))
    read = FileSource.read

    def slowly(source):
        found = read(source)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(FileSource, "read", slowly)
    with ThreadPoolExecutor(len(names)) as threads:
        done = [
            threads.submit(main, ["pool", "drain", name, "--members", str(file)]) for name in names
        ]
    assert [each.result() for each in done] == [0] * len(names)
    assert states(file) == {**dict.fromkeys(names, "draining"), "last": "serving"}


def test_a_command_that_waits_for_another_for_too_long_changes_nothing(file, capsys, monkeypatch):
    monkeypatch.setattr(pool, "LOCK_S", 0.1)
    before = file.read_text()
    with locked_beside(file, 1.0):
        assert main(["pool", "drain", "a", "--members", str(file)]) == 2
    assert f"another process has held '{file}.lock' for 0.1 s" in capsys.readouterr().err
    assert file.read_text() == before
