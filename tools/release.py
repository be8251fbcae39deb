"""Build the files of a release: wheel, source distribution, image, list of components, checksums.

`make release` runs it; RELEASING.md has the steps before and after.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SHIPPED_EXTRAS = "secure,dns"
"""The extras that the image installs, so that the list of components is the image's."""


def version() -> str:
    """Return the version that the sources declare."""
    text = (ROOT / "src/holdfast/version.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(found)


def check_tag() -> None:
    """Exit with an error if this commit has a release tag of another version, or no changes named.

    A commit without a release tag is not checked: it is a rehearsal.
    """
    done = subprocess.run(
        [shutil.which("git") or "git", "tag", "--points-at", "HEAD", "v*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    tags = done.stdout.split()
    if not tags:
        return
    if f"v{version()}" not in tags:
        sys.exit(f"tag {tags[0]}: src/holdfast/version.py says {version()}; set it, or tag again")
    if f"\n## {version()}" not in (ROOT / "CHANGELOG.md").read_text():
        sys.exit(f"CHANGELOG.md has no section '## {version()}'; rename 'Unreleased' to it")


def build_distributions(folder: Path) -> Path:
    """Build the source distribution, and the wheel from it; return the wheel's path."""
    run(BIN / "uv", "build", "--quiet", "--out-dir", folder, ROOT)
    (folder / ".gitignore").unlink(missing_ok=True)  # uv writes one
    (wheel,) = folder.glob("*.whl")
    return wheel


def write_components(wheel: Path, folder: Path) -> None:
    """Write the software bill of materials (CycloneDX) of the wheel with the image's extras."""
    target = folder / f"holdfast-kv-{version()}.cdx.json"
    with tempfile.TemporaryDirectory() as scratch:
        python = Path(scratch) / "bin" / "python"
        run(BIN / "uv", "venv", "--quiet", "--python", sys.executable, scratch)
        run(BIN / "uv", "pip", "install", "-q", "--python", python, f"{wheel}[{SHIPPED_EXTRAS}]")
        options = ("--output-reproducible", "--output-file", target)
        run(BIN / "cyclonedx-py", "environment", *options, python)


def build_image(folder: Path, program: str) -> None:
    """Build the container image with podman or docker, and save it compressed."""
    name = f"holdfast:{version()}"
    run(program, "build", "--tag", name, "--file", "deploy/container/Containerfile", ".")
    plain = folder / f"holdfast-{version()}.image.tar"
    run(program, "save", "--output", plain, name)
    with plain.open("rb") as source, gzip.open(f"{plain}.gz", "wb") as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


def write_checksums(folder: Path) -> None:
    """Write SHA256SUMS over all files of the folder, for `sha256sum --check`."""
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(folder.iterdir())
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


def run(*command: object) -> None:
    """Run a command in the clone; exit with its output if it fails."""
    # The build must not depend on a path that this process was given.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command[0]} ended with status {done.returncode}:\n{done.stdout}")


def main() -> None:
    """Build a release into a new folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a new folder for the files")
    parser.add_argument("--image", metavar="PROGRAM", help="build the image with podman or docker")
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    check_tag()
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        sys.exit(f"{folder} is there already; remove it, or name a new folder")
    wheel = build_distributions(folder)
    write_components(wheel, folder)
    if options.image:
        build_image(folder, options.image)
    write_checksums(folder)
    for file in sorted(folder.iterdir()):
        print(f"{file.stat().st_size:>12,}  {file.name}")


if __name__ == "__main__":
    main()
