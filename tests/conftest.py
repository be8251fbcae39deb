"""What every test can ask for."""

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The shipped contracts: what they assert is told like what a test asserts.
pytest.register_assert_rewrite("holdfast.testing")

# --hypothesis-profile picks one. No deadlines: these tests share two cores with servers.
_SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=50, **_SHARED)
# The same examples every time: a change is judged by what it does, and `soak` looks for new ones.
settings.register_profile("ci", max_examples=100, derandomize=True, print_blob=True, **_SHARED)
settings.register_profile("soak", max_examples=20_000, print_blob=True, **_SHARED)
settings.load_profile("default")


STARTS_ENGINES = ("tests/engines/vllm/", "tests/bench/scenarios/test_demo.py")
"""What the paths of tests begin with that start vLLM, or import it."""


def pytest_collection_modifyitems(config, items):
    """Leave the tests that are long, or need a GPU, out unless -m asks for some."""
    if not config.option.markexpr:
        left_out = [item for item in items if any(map(item.get_closest_marker, ("soak", "gpu")))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give every file to one process, and all files that start vLLM to the same one.

    An engine uses every core: two at a time take longer than one after the other.
    """
    from xdist.scheduler import LoadFileScheduling

    class EnginesInOneProcess(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "engines" if file.startswith(STARTS_ENGINES) else file

    return EnginesInOneProcess(config, log)


_internal_errors = []


def pytest_internalerror(excrepr, excinfo):
    """Keep the errors of pytest itself: that of a worker comes long before the run ends for it."""
    _internal_errors.append(str(excrepr))


def pytest_unconfigure(config):
    """Say the first error of pytest itself again, as the last thing that a log shows."""
    if _internal_errors and not hasattr(config, "workerinput"):
        last_lines = "\n".join(_internal_errors[0].splitlines()[-40:])
        sys.stderr.write(f"the first internal error ends with:\n{last_lines}\n")


def pytest_collection_finish():
    """Go no more through what the tests have imported: every thread waits long for that."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def stalls():
    """Watch for stalls of processors: `since` returns the seconds of a time without them."""
    from holdfast.testing.stalls import StallWatch  # not before it is rewritten

    with StallWatch() as watch:
        yield watch


@pytest.fixture
def soak_s():
    """Seconds that a soak test may take: what `make soak MINUTES=n` asked for."""
    return 60 * float(os.environ.get("HOLDFAST_SOAK_MINUTES", "1"))


@pytest.fixture
def holdfast():
    """Run `holdfast ARGUMENTS`; returns the finished process."""

    def run(*arguments, **options):
        argv = [sys.executable, "-m", "holdfast", *map(str, arguments)]
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=120, check=False, **options
        )

    return run


@pytest.fixture
def reported(tmp_path):
    """Run `holdfast ARGUMENTS --json FILE` here; returns the status and the rows that it wrote."""

    from holdfast.cli import main

    def run(*arguments):
        target = tmp_path / "report.json"
        status = main([*map(str, arguments), "--json", str(target)])
        return status, json.loads(target.read_text())["rows"]

    return run


def run_apt(*command, folder="."):
    """Run an apt or dpkg command; return the reason if it fails, else an empty text."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return ""
    message = (done.stderr.strip() or "no error message").splitlines()[-1]
    return f"`{' '.join(command)}` fails: {message}"


@pytest.fixture(scope="session")
def install_package():
    """Install a Debian package; return the reason if that fails, else an empty text."""

    def install(package):
        options = ["-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=200"]
        return run_apt("apt-get", "install", *options, package)

    return install


@pytest.fixture(scope="session")
def find_program(install_package):
    """Return the path of the first of `names`; skip if there is none and none can be installed."""

    def find(package, *names):
        for attempt in ("", "installed"):
            reason = install_package(package) if attempt else ""
            if found := next(filter(None, map(shutil.which, names)), None):
                return found
        return pytest.skip(f"no {names[0]} here, and it cannot be installed: {reason}")

    return find


@pytest.fixture(scope="session")
def browser(find_program):
    """The path of a browser that runs without a display."""
    names = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"
    return find_program("chromium-headless-shell", *names)


@pytest.fixture(scope="session")
def unpack_program():
    """Return the path of a program from an unpacked Debian package, of which no service starts.

    Packages are kept unpacked beside the virtual environment's other files. Skips, with the reason,
    if the package cannot be downloaded.
    """

    def unpack(package, name):
        folder = Path(sys.prefix) / "debian" / package
        program = next((folder / "usr").glob(f"*bin/{name}"), folder / "usr" / "bin" / name)
        if program.exists():
            return str(program)
        if found := shutil.which(name):
            return found
        folder.mkdir(parents=True, exist_ok=True)
        reason = run_apt("apt-get", "download", package, folder=folder)
        for file in folder.glob("*.deb"):
            reason = run_apt("dpkg", "-x", str(file), str(folder))
            file.unlink()
        program = next((folder / "usr").glob(f"*bin/{name}"), program)
        if not program.exists():
            pytest.skip(f"no {name} here, and it cannot be unpacked: {reason}")
        return str(program)

    return unpack
