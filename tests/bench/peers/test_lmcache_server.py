"""LMCache is found where `make lmcache` installs it, and the reason names that command."""

import pytest

from holdfast_bench.peers import lmcache_environment, lmcache_server


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(lmcache_server, "find_spec", lambda _: None)
    return lmcache_environment.folder()


def test_without_lmcache_the_reason_names_the_command_that_installs_it(folder):
    assert not lmcache_server.installed()
    assert lmcache_server.why_not() == (
        f"LMCache is not installed; `make lmcache` installs it in {folder} (60 MB)"
    )
    assert "PYTHONPATH" not in lmcache_server.variables()


def test_lmcache_in_its_folder_is_found_by_the_processes_that_import_it(folder):
    folder.mkdir(parents=True)
    (folder / "holdfast-installed").touch()
    assert lmcache_server.installed()
    assert str(folder) in lmcache_server.variables()["PYTHONPATH"].split(":")


def test_lmcache_among_the_packages_of_this_python_needs_no_folder(folder, monkeypatch):
    monkeypatch.setattr(lmcache_server, "find_spec", lambda _: object())
    assert lmcache_server.installed()
