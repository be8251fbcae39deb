"""The container file builds an image as the page says, and the image serves a node.

No registry is asked: a base image of the same name is made of this machine's essential packages
and its Python. Containers run in a changed root, because not every machine that runs the tests can
give them control groups.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = "docker.io/library/python:3.11-slim-bookworm"
WITHIN_S = 600
SETTINGS = ("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/pip.conf", "/etc/xdg", "/etc/ssl")

STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/run"
"""

# $0: the folder of a container; then its user, and its command.
RUN = """
set -eu
mount --rbind /dev "$0/dev"
mount --rbind /proc "$0/proc"
exec chroot --userspec="$1" "$0" "${@:2}"
"""


def run(*command, env=None):
    """Run a command in the clone; return what it printed."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def essential_files():
    """Yield the files of the packages that every Debian machine has, and of the C library,
    without documentation."""
    packages = run("dpkg-query", "-Wf", "${binary:Package} ${Essential} ${Priority}\n")
    for line in packages.splitlines():
        package, *reasons = line.split()
        if package.startswith("libc6:") or {"yes", "required"} & set(reasons):
            files = run("dpkg", "-L", package).splitlines()
            yield from (file for file in files if not file.startswith("/usr/share/"))


def libraries(programs):
    """Yield the shared libraries that programs and libraries load."""
    done = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False)
    yield from re.findall(r"(/\S+) \(0x", done.stdout)


def make_base(root):
    """Fill a folder with this machine's essential packages, and its Python in /usr/local."""
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    prefix = Path(sys.base_prefix)
    unused = shutil.ignore_patterns("site-packages", "test", "config-*", "__pycache__", "share")
    shutil.copytree(prefix, root / "usr" / "local", symlinks=True, ignore=unused)
    files = set(essential_files())
    programs = [file for file in files if re.match(r"(/usr)?/s?bin/", file)]
    files.update(libraries([*programs, *map(str, (prefix / "lib").rglob("lib-dynload/*.so"))]))
    for path in filter(os.path.exists, SETTINGS):
        files.update(run("find", path, "-type", "f", "-o", "-type", "l").splitlines())
    for source in map(Path, files):
        if source.is_file() and prefix not in source.parents:
            target = root / source.parent.resolve().relative_to("/") / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for name in ("dev", "proc", "tmp"):
        (root / name).mkdir(mode=0o1777)
    run("ldconfig", "-r", root)


@pytest.fixture
def podman(tmp_path, find_program):
    """Run podman with images of its own, among them the base image; returns what it printed.

    Skips if podman cannot build an image here.
    """
    if os.geteuid() or sys.base_prefix == "/usr":
        pytest.skip("a base image is made by root, of a Python with a folder of its own")
    find_program("dpkg", "dpkg-query")
    program = find_program("podman", "podman")
    settings = tmp_path / "storage.conf"
    settings.write_text(STORAGE.format(folder=tmp_path))
    (tmp_path / "containers.conf").write_text('[containers]\nnetns = "host"\n')
    env = {
        "PATH": os.environ["PATH"],
        "BUILDAH_ISOLATION": "chroot",
        "CONTAINERS_STORAGE_CONF": str(settings),
        "CONTAINERS_CONF": str(tmp_path / "containers.conf"),
    }
    (tmp_path / "base").mkdir()
    make_base(tmp_path / "base")
    run("tar", "-cf", tmp_path / "base.tar", "-C", tmp_path / "base", ".")
    smallest = tmp_path / "Containerfile"
    smallest.write_text(f"FROM {BASE}\nRUN true\n")
    try:
        for verb, *arguments in (
            ("import", tmp_path / "base.tar", BASE),
            ("build", "-f", smallest, tmp_path),
        ):
            command = [program, verb, *arguments]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"podman cannot {verb} here: {done.stderr.strip()}")
        yield lambda *arguments: run(program, *arguments, env=env)
    finally:
        run(program, "system", "reset", "--force", env=env)


@pytest.mark.timeout(WITHIN_S)
def test_the_image_is_built_as_the_page_says_and_serves(tmp_path, deploy, podman):
    page = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
    [build] = re.findall(r"^podman (build .*)$", page, re.MULTILINE)
    podman(*build.split())
    [image] = json.loads(podman("inspect", "holdfast"))
    settings = image["Config"]
    container = Path(podman("mount", podman("create", "holdfast").strip()).strip())
    config = container / "etc" / "holdfast" / "node.yaml"
    config.parent.mkdir()
    config.write_text(
        "listen: unix:///run/holdfast/node.sock\n"
        "tiers:\n"
        "  - {kind: host, capacity: 64 MiB}\n"
        "  - {kind: disk, path: /var/lib/holdfast/blocks, capacity: 64 MiB}\n"
    )
    start = ["unshare", "--mount", "bash", "-c", RUN, container, settings["User"]]
    start += settings["Entrypoint"]
    with subprocess.Popen([*start, *settings["Cmd"]], stdout=subprocess.PIPE, text=True) as node:
        try:
            assert node.stdout.readline() == "READY unix:///run/holdfast/node.sock\n"
            assert "0 B of 64 MiB used" in run(*start, "inspect")
        finally:
            node.terminate()
    assert node.returncode == 0
    blocks = container / "var" / "lib" / "holdfast" / "blocks"
    assert f"{blocks.stat().st_uid}:{blocks.stat().st_gid}" == settings["User"] == "7441:7441"
