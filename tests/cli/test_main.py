"""`holdfast` itself: help, versions, exit codes, and a quick start."""

import argparse
import os
import subprocess
import sys
from importlib import import_module

import pytest

from holdfast import __version__, cli
from holdfast.errors import (
    BlockError,
    BusyError,
    ConfigError,
    FormatError,
    NodeGoneError,
    RefusedError,
)
from holdfast.node.daemon import NO_PARENT


def test_help_names_every_verb_and_exit_code(holdfast):
    done = holdfast("--help")
    assert done.returncode == 0
    verbs = cli.all_verbs()
    width = len("completion") + 2
    assert max(map(len, verbs)) == len("completion")
    for name, verb in verbs.items():
        assert f"\n  {name:<{width}}{verb.about}\n" in done.stdout
    assert "exit codes: 0 all is well" in done.stdout
    assert holdfast().stdout == done.stdout


def test_every_verb_has_help_of_its_own(capsys):
    for verb in cli.all_verbs():
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([verb, "--help"])
        shown = capsys.readouterr()
        assert shown.err == ""
        assert f"usage: holdfast {verb}" in shown.out


def test_help_loads_nothing_heavy():
    script = (
        "import sys\nfrom holdfast.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stderr.split())
    assert not loaded & {"numpy", "yaml", "asyncio", "xxhash", "rich", "torch", "vllm", "logging"}


def test_verbs_of_other_packages_are_found_as_by_importlib_metadata(tmp_path):
    (tmp_path / "other.py").write_text(
        "from holdfast.cli import Verb\nVERBS = {'juggle': Verb('other', 'juggle blocks', '')}\n"
    )
    (tmp_path / "other-1.0.dist-info").mkdir()
    (tmp_path / "other-1.0.dist-info" / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    (tmp_path / "other-1.0.dist-info" / "entry_points.txt").write_text(
        "[console_scripts]\nother = other:main\n\n"
        "[holdfast.verbs]\njuggle = other:VERBS\n\n[pytest11]\nother = other:plugin\n"
    )
    (tmp_path / "broken-1.0.dist-info" / "entry_points.txt").mkdir(parents=True)
    script = (
        "from importlib import metadata\nfrom holdfast import cli\n"
        "known = metadata.entry_points(group=cli.ENTRY_POINTS)\n"
        "assert {(p.module, p.attr) for p in known} == set(cli._entry_points())\n"
        "print(cli.all_verbs()['juggle'].about)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("juggle blocks\n", "")


def test_version(holdfast):
    assert holdfast("--version").stdout == f"holdfast {__version__}\n"


@pytest.mark.parametrize("word", ["--foo", "-", "-x"])
def test_an_option_in_place_of_a_verb_is_named(word, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([word])
    assert ended.value.code == cli.USAGE
    assert f"unrecognized arguments: {word}\n" in capsys.readouterr().err


def test_an_unknown_verb_is_wrong_usage(holdfast):
    done = holdfast("fly")
    assert done.returncode == 2
    assert done.stderr == "holdfast: there is no verb 'fly'; see `holdfast --help`\n"
    assert "did you mean `holdfast inspect`?" in holdfast("inspct").stderr


@pytest.mark.parametrize(("name", "verb"), cli.all_verbs().items())
def test_the_example_of_each_verb_parses_and_its_help_states_defaults(name, verb):
    parser = argparse.ArgumentParser(prog=name, exit_on_error=False)
    import_module(verb.module).add_arguments(parser)
    parser.parse_args(verb.example.split())
    for action in parser._actions:
        if action.default not in (None, False, "", [], NO_PARENT, argparse.SUPPRESS):
            assert "default" in (action.help or ""), action.option_strings


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (FormatError("x"), 2),
        (BusyError("x"), 3),
        (NodeGoneError("x"), 4),
        (RefusedError("x"), 4),
        (BlockError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes_and_one_line(monkeypatch, capsys, error, code):
    from holdfast.cli import doctor

    def fail(args):
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert cli.main(["doctor"]) == code
    expected = "" if isinstance(error, KeyboardInterrupt) else "holdfast doctor: x\n"
    assert capsys.readouterr().err == expected


def test_an_oserror_is_reported_in_one_line(monkeypatch, capsys):
    from holdfast.cli import doctor

    def fail(args):
        raise PermissionError(13, "Permission denied", "/srv/x")

    monkeypatch.setattr(doctor, "run", fail)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "holdfast doctor: /srv/x: Permission denied\n"


def test_an_interrupt_during_the_import_of_a_verb_gives_only_an_exit_code(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert cli.main(["sim", "conversation"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "argv",
    [
        ["doctor"],
        ["inspect", "--node", "unix:///nowhere/node.sock"],
        ["inspect", "audit"],
        ["domain", "erase", "acme", "--node", "unix:///nowhere/node.sock"],
        ["verify", "--node", "unix:///nowhere/node.sock"],
        ["soak", "torn", "--faults", "1"],
        ["sim", "conversation", "--ladder", "none.yaml"],
        ["size", "--model", "Llama-3.1-8B", "--users", "1"],
        ["bench", "seal"],
        ["demo"],
    ],
)
def test_the_json_path_is_checked_before_the_work_begins(tmp_path, capsys, argv):
    target = str(tmp_path / "none" / "x.json")
    assert cli.main([*argv, "--json", target]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"--json: cannot write {target!r}: No such file or directory; choose" in said.err
    assert not list(tmp_path.iterdir())


def refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == cli.USAGE
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["size", "--modle", "qwen3-8b"], "did you mean --model instead of --modle?"),
        (["size", "--slo-tft=1"], "did you mean --slo-ttft instead of --slo-tft?"),
        (["sim", "taubench", "--lader", "x"], "did you mean --ladder instead of --lader?"),
        (["bench", "seal", "--quik"], "did you mean --quick instead of --quik?"),
    ],
)
def test_the_closest_option_is_suggested_for_an_unknown_option(words, says, capsys):
    assert refused(words, capsys).endswith(says)


@pytest.mark.parametrize("words", [["size", "--xyzzy-quux"], ["size", "--us", "x"], ["sim"]])
def test_no_option_is_suggested_if_none_is_close(words, capsys):
    assert "did you mean" not in refused(words, capsys)
