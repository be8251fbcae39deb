"""Certificate authority for tests and benches."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import trustme

from holdfast.wire.remote.credentials import TlsFiles


class Authority:
    """A certificate authority that writes its files to `folder`, which must exist."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA(organization_name=f"holdfast {name}")
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(
        self,
        name: str,
        address: str = "127.0.0.1",
        begins: datetime | None = None,
        expires: datetime | None = None,
    ) -> TlsFiles:
        """Write a certificate for one IP address or name, and its private key; return the paths.

        By default it is valid from 2000 to 3000.
        """
        issued = self._ca.issue_cert(
            address, common_name=name, not_before=begins, not_after=expires
        )
        certificate, private = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(certificate)
        private.touch(mode=0o600)
        issued.private_key_pem.write_to_path(private)
        return TlsFiles(str(certificate), str(private), str(self.file))
