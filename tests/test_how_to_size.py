"""The page on sizing shows what the commands on it print, and its pictures are theirs."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from holdfast.cli import main
from holdfast.sim.profile import Gpu, Medium, Site, load_profile, shipped

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "how-to" / "size.md").read_text()
REFERENCE = (ROOT / "docs" / "reference" / "profile.md").read_text()
SESSIONS = re.findall(r"```console\n\$ holdfast (.*)\n((?s:.*?))```", PAGE)


def test_the_page_has_its_sessions():
    assert len(SESSIONS) == 8


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        # The longest trace takes half a minute.
        pytest.param(*session, marks=[pytest.mark.soak] * ("claude-code" in session[0]))
        for session in SESSIONS
    ],
    ids=lambda text: text[:60],
)
def test_a_session_prints_what_the_page_shows(command, shown, capsys, tmp_path):
    arguments = shlex.split(command)
    drawn = arguments.index("--svg") + 1 if "--svg" in arguments else 0
    picture = ROOT / arguments[drawn]
    if drawn:
        arguments[drawn] = str(tmp_path / "picture.svg")
    main(arguments)
    out, err = capsys.readouterr()
    printed = [line for line in (out or err).splitlines() if line]
    at = 0
    for line in filter(None, shown.splitlines()):
        if line != "...":
            assert line in printed[at:], line
            at = printed.index(line, at) + 1
    if drawn:
        assert (tmp_path / "picture.svg").read_text() == picture.read_text()


@pytest.mark.parametrize("page", [PAGE, REFERENCE], ids=["how-to", "reference"])
def test_the_profiles_on_the_pages_override_the_shipped_profile(page, tmp_path):
    [text] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    profile = load_profile(str(tmp_path / "mine.yaml"))
    assert profile.gpus["H200"].dollars_per_hour.mid == 2.2
    assert set(yaml.safe_load(text)["media"]) <= set(profile.media)


def test_every_key_of_the_profile_is_described():
    described = set(re.findall(r"`([\w-]+)`", REFERENCE))
    for kind in (Site, Medium, Gpu):
        assert set(kind.__struct_fields__) <= described
    assert {*shipped().media, *shipped().gpus} <= described
