"""What the verbs have in common: numbers of things in words."""

import argparse
import os

import pytest

from holdfast.cli import options
from holdfast.cli.options import count, many
from holdfast.config import default_address


@pytest.mark.parametrize(
    ("count", "what", "words"),
    [
        (1, "pass", "1 pass"),
        (0, "pass", "0 passes"),
        (2, "block", "2 blocks"),
        (1, "stored copy", "1 stored copy"),
        (3, "stored copy", "3 stored copies"),
        (2, "data key", "2 data keys"),
    ],
)
def test_a_count_of_one_is_written_in_the_singular(count, what, words):
    assert many(count, what) == words


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("32,000", 32_000), ("32k", 32_000), ("1.005K", 1_005), ("1.5m", 1_500_000)],
)
def test_a_count_may_be_in_thousands_and_millions(text, number):
    assert count(text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1.0005k", "1e3", "10g", "nan", "1" * 99])
def test_an_invalid_count_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write 32000 or 32k"):
        count(text)


def test_the_node_is_the_users_own_or_else_the_machines(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    machine = tmp_path / "machine.sock"
    monkeypatch.setattr(options, "machine_address", lambda: f"unix://{machine}")
    parser = argparse.ArgumentParser()
    options.add_node_arguments(parser)

    def found(*arguments):
        return options.node_address(parser.parse_args(arguments))

    assert found() == default_address()  # there is neither
    machine.touch()
    assert found() == f"unix://{machine}"
    assert found("--set", "listen=unix:///run/mine.sock") == "unix:///run/mine.sock"
    assert found("--node", "unix:///run/mine.sock") == "unix:///run/mine.sock"
    (tmp_path / "holdfast").mkdir()
    (tmp_path / "holdfast" / "node.sock").touch()
    assert found() == default_address()


def test_a_machine_node_in_a_folder_that_the_user_may_not_search_is_not_found(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    monkeypatch.setattr(options, "machine_address", lambda: f"unix://{folder}/node.sock")
    parser = argparse.ArgumentParser()
    options.add_node_arguments(parser)
    user = os.geteuid()
    try:
        if not user:
            os.seteuid(65534)  # root may search every folder
        assert options.node_address(parser.parse_args([])) == default_address()
    finally:
        os.seteuid(user)
