"""Read secret keys from files, inherited descriptors and commands."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from holdfast.blocks.key import DOMAIN_KEY_BYTES
from holdfast.config import Config, DomainOptions
from holdfast.errors import ConfigError
from holdfast.regular_file import check_regular

_READ_BYTES = 2 * DOMAIN_KEY_BYTES + 2
_ERROR_CHARS_MAX = 200
"""Maximum length of a key command's error output in a message."""

_FORM = f"{DOMAIN_KEY_BYTES} bytes or {2 * DOMAIN_KEY_BYTES} hex digits"


def domain_key(name: str, domain: DomainOptions) -> bytes:
    """Return the 32 secret bytes of a configured domain; raise ConfigError if that fails."""
    at = f"domains.{name}"
    if domain.key_command:
        return _from_command(domain.key_command, domain.key_timeout_s, f"{at}.key_command")
    if domain.key_fd is not None:
        fd, setting = domain.key_fd, f"{at}.key_fd"
        try:
            with os.fdopen(fd, "rb") as opened:  # closes it, so that no other process inherits it
                data = opened.read(_READ_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{setting}: descriptor {fd} cannot be read: {error.strerror}; start the node with "
                f"the key on it: holdfast serve {fd}< FILE"
            ) from error
        failure = f"descriptor {fd} gave {len(data)} bytes; it must give {_FORM}"
        return _key(data, f"{setting}: {failure}")
    return read_key(Path(domain.key_file), f"{at}.key_file")


def check_descriptors(config: Config) -> None:
    """Raise ConfigError for a `key_fd` that this process was not started with.

    Call it before any file or socket is opened: otherwise an unused descriptor number may become
    one of the node's own, which reading the key would consume and close.
    """
    for name, domain in config.domains.items():
        if domain.key_fd is not None and not was_handed_over(domain.key_fd):
            raise ConfigError(
                f"domains.{name}.key_fd: descriptor {domain.key_fd} is not open; start "
                f"the node with the key on it, as in: holdfast serve {domain.key_fd}< FILE"
            )


def was_handed_over(fd: int) -> bool:
    """Whether this process inherited a descriptor; those that Python opens are not inheritable."""
    try:
        return os.get_inheritable(fd)
    except (OSError, OverflowError):
        return False


def read_key(file: Path, setting: str) -> bytes:
    """Return the 32 secret bytes in a file. Raises ConfigError, which begins with `setting`."""
    try:
        check_regular(file)
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            data = opened.read(_READ_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{setting}: {str(file)!r} cannot be read: {error.strerror}; "
            f"make it with: (umask 077; head -c {DOMAIN_KEY_BYTES} /dev/urandom > FILE)"
        ) from error
    except OSError as error:  # the advice must not overwrite an existing key
        raise ConfigError(
            f"{setting}: {str(file)!r} cannot be read: {error.strerror}; "
            "name a file that belongs to the node's user"
        ) from error
    check_private(file, mode, setting)
    nbytes = f"{len(data)} bytes{' or more' * (len(data) == _READ_BYTES)}"
    return _key(data, f"{setting}: {str(file)!r} holds {nbytes}, not a key; it must hold {_FORM}")


def check_private(file: Path, mode: int, setting: str) -> None:
    """Raise ConfigError, which begins with `setting`, if a mode lets other users open the file."""
    if mode & 0o077:
        raise ConfigError(f"{setting}: {str(file)!r} is open to other users; chmod 600 it")


def _from_command(command: list[str], timeout_s: float, setting: str) -> bytes:
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                data, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise ConfigError(
                    f"{setting}: {command[0]!r} printed no key within {timeout_s:g} s; see why, or "
                    "raise key_timeout_s"
                ) from None
    except OSError as error:
        raise ConfigError(
            f"{setting}: {command[0]!r} cannot be run: {error.strerror}; correct it"
        ) from error
    if process.returncode:
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2][:_ERROR_CHARS_MAX]
        raise ConfigError(
            f"{setting}: {command[0]!r} ended with {process.returncode}: "
            f"{last_line or 'no error output'}; run it by hand as the node's user"
        )
    return _key(data, f"{setting}: {command[0]!r} printed {len(data)} bytes; it must print {_FORM}")


def _key(data: bytes, failure: str) -> bytes:
    """Return a key given as bytes or hex digits; raise ConfigError with `failure` otherwise."""
    if len(data) == DOMAIN_KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != DOMAIN_KEY_BYTES:
        raise ConfigError(failure)
    return key
