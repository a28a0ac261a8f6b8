"""Master keys of one's own: from a file that its owner alone can read, or from the environment.

One line per master key, `NAME:BASE64-OF-32-BYTES`; in the environment commas separate them as well. The last one is the
newest and wraps; the others unwrap what they wrapped. Lines that begin with `#` are comments.

A wrapped key is binary: a version byte (0x01), a random nonce (12), the key sealed with AES-256-GCM (32), the tag (16);
the key's name is authenticated beside it.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sagas.clock import RandomBytes, random_bytes
from sagas.errors import InvalidInput, KeyLost, Tampered
from sagas.wrapping.wrapper import KeyName, Wrapped
from sagas_store.inputs import check_kind, kind_of

__all__ = ["LocalKeyWrapper", "add_master_key"]

_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_FORM: Final = b"\x01"
_WRAPPED_BYTES: Final = len(_FORM) + _NONCE_BYTES + _KEY_BYTES + 16
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FILE_BYTES_MAX: Final = 64 * 1024


class LocalKeyWrapper:
    """Wraps with a master key that this process holds. Whoever reads its memory or its file can unwrap everything."""

    def __init__(self, masters: Mapping[str, bytes], *, random_bytes: RandomBytes = random_bytes) -> None:
        """`masters` are names and 32 bytes each; the last one wraps."""
        self._masters: dict[str, AESGCM] = {}
        if problem := _problem_of(masters):
            del masters  # loggers that print a traceback's variables must not find keys there
            raise InvalidInput("masters", problem)
        self._masters = {name: AESGCM(key) for name, key in masters.items()}
        self._newest = next(reversed(self._masters))
        self._random_bytes = random_bytes

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Master keys from a file that `add_master_key` writes. Raises InvalidInput, naming what to put right.

        Refused unless it is a plain file of this user's (or root's) that nobody else can read or write.
        """
        path = _path(path)
        return cls(_masters(str(path), lambda: _read(path)))

    @classmethod
    def from_env(cls, variable: str = "SAGAS_MASTER_KEYS") -> Self:
        """Master keys from an environment variable. Raises InvalidInput when it is missing or wrong.

        Child processes inherit it, and on Linux /proc shows it to the same user; a file is the better place.
        """
        if not os.environ.get(check_kind("variable", variable, str, "'SAGAS_MASTER_KEYS'")):
            raise InvalidInput(variable, "is not set; it should hold NAME:BASE64-OF-32-BYTES, the newest last")
        return cls(_masters(variable, lambda: os.environ[variable]))

    def __repr__(self) -> str:
        return f"LocalKeyWrapper({', '.join(self._masters)})"

    async def wrap(self, name: KeyName, key: bytes) -> Wrapped:
        """Wrap with the newest master key."""
        nonce = self._random_bytes(_NONCE_BYTES)
        sealed = self._masters[self._newest].encrypt(nonce, key, name.as_bytes())
        return Wrapped(self._newest, _FORM + nonce + sealed)

    async def unwrap(self, name: KeyName, wrapped: Wrapped) -> bytes:
        """Unwrap with the master key that wrapped it. Raises KeyLost when it is not at hand, Tampered."""
        if (master := self._masters.get(wrapped.master)) is None:
            raise KeyLost(name.tenant, name.key_id, f"its master key {wrapped.master!r} is not among those given here")
        blob = wrapped.wrapped
        altered = Tampered(
            name.tenant,
            name.key_id,
            f"its wrapped bytes do not authenticate: they were altered, or another master key was called "
            f"{wrapped.master!r} when it wrapped them",
        )
        if len(blob) != _WRAPPED_BYTES or blob[:1] != _FORM:
            raise altered
        try:
            return master.decrypt(blob[1 : 1 + _NONCE_BYTES], blob[1 + _NONCE_BYTES :], name.as_bytes())
        except InvalidTag:
            raise altered from None


def add_master_key(
    path: str | os.PathLike[str], name: str, *, random_bytes: RandomBytes = random_bytes
) -> LocalKeyWrapper:
    """Append a new random master key to the file, which is made if it is missing, and return a wrapper on all of them.

    The new one wraps from now on. Raises InvalidInput when the name is taken or the file is not as it should be.
    Keep a copy of the file where the database's backups are not: without it nothing that is sealed opens again.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput("name", "must be of letters, digits and . _ - and at most 64 long")
    path = _path(path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be written: {error.strerror}") from None
    try:
        if _read(path).strip() and name in _masters(str(path), lambda: _read(path)):
            raise InvalidInput("name", f"{path} has a master key {name!r} already")
        begin = "" if _read(path)[-1:] in ("", "\n") else "\n"
        os.write(descriptor, f"{begin}{name}:{base64.b64encode(random_bytes(_KEY_BYTES)).decode()}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _sync_folder(path)
    return LocalKeyWrapper.from_file(path)


def _path(given: object) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise InvalidInput("path", f"must be the path of a file, not {kind_of(given)}")
    return Path(given)


def _sync_folder(path: Path) -> None:
    """Make the file's name as durable as its content."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> str:
    """The file's text, if nobody else can have read or changed it. What is opened is what is checked."""
    where = str(path)
    if os.name != "posix":
        raise InvalidInput(where, "who may read it cannot be told on this system; use the environment: from_env")
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInput(where, "is not a plain file")
            if status.st_uid not in (os.geteuid(), 0):
                raise InvalidInput(where, f"belongs to user {status.st_uid}; chown it to the user this runs as")
            if status.st_mode & 0o077:
                raise InvalidInput(where, f"others may use it (mode {status.st_mode & 0o777:o}); chmod 600 it")
            if status.st_size > _FILE_BYTES_MAX:
                raise InvalidInput(where, f"is larger than {_FILE_BYTES_MAX:,} bytes; is it the right file?")
            return file.read(_FILE_BYTES_MAX).decode("ascii", errors="replace")
    except OSError as error:
        raise InvalidInput(where, f"cannot be read: {error.strerror}") from None


def _masters(where: str, read: Callable[[], str]) -> dict[str, bytes]:
    """Names and keys. No error quotes what it found, nor has it at hand: it may be a key in the wrong place."""
    found = _parsed(read())
    if isinstance(found, str):
        raise InvalidInput(where, found)
    return found


def _parsed(text: str) -> dict[str, bytes] | str:
    """Names and keys, or what is wrong."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    entries = [entry.strip() for line in lines for entry in line.split(",")]
    masters: dict[str, bytes] = {}
    for number, entry in enumerate(filter(None, entries), start=1):
        name, colon, encoded = entry.partition(":")
        try:
            key = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            key = b""
        if not colon or not _NAME.fullmatch(name) or len(key) != _KEY_BYTES:
            return f"entry {number} is not NAME:BASE64-OF-32-BYTES"
        if name in masters:
            return f"entry {number} has a name that stands there already"
        masters[name] = key
    return masters or "holds no master key"


def _problem_of(masters: Mapping[str, bytes]) -> str | None:
    if not isinstance(masters, Mapping):
        return f"must be names and 32 bytes each, in a dict, not {kind_of(masters)}"
    if not masters:
        return "a wrapper needs at least one master key"
    for name, key in masters.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return "a name is of letters, digits and . _ - and at most 64 long"
        if not isinstance(key, bytes):
            return f"master key {name!r} must be bytes, not {kind_of(key)}"
        if len(key) != _KEY_BYTES:
            return f"master key {name!r} is {len(key)} bytes long, not {_KEY_BYTES}"
    return None
