"""One mongod: where it is found, whether it runs here, how it is started, and what its way of ending means."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sagas_store.embedded.errors import (
    EmbeddedError,
    FolderInUse,
    FolderUnusable,
    MissingLibrary,
    NoMongod,
    PortInUse,
    StartFailed,
)
from sagas_store.embedded.guard import small_environment

OLDEST: Final = 5
"""The first major version with everything a start relies on; 6.0 is the one we test."""

# Debian's and Ubuntu's names. Where a release renamed the package (libcurl4t64), the old name still installs it.
PACKAGES: Final = {
    "libcurl.so.4": "libcurl4",
    "libcrypto.so.3": "libssl3",
    "libssl.so.3": "libssl3",
    "libcrypto.so.1.1": "libssl1.1",
    "libssl.so.1.1": "libssl1.1",
    "liblzma.so.5": "liblzma5",
    "libgssapi_krb5.so.2": "libgssapi-krb5-2",
    "libkrb5.so.3": "libkrb5-3",
    "liblber-2.5.so.0": "libldap-2.5-0",
    "libldap-2.5.so.0": "libldap-2.5-0",
    "libnetsnmp.so.40": "libsnmp40",
    "libnetsnmpagent.so.40": "libsnmp40",
    "libnetsnmpmibs.so.40": "libsnmp40",
    "libnghttp2.so.14": "libnghttp2-14",
    "libsasl2.so.2": "libsasl2-2",
    "libgcc_s.so.1": "libgcc-s1",
    "libstdc++.so.6": "libstdc++6",
    "libz.so.1": "zlib1g",
    "libzstd.so.1": "libzstd1",
}

_MISSING_LIBRARY: Final = re.compile(
    r"error while loading shared libraries: (?P<glibc>\S+): cannot open"  # ld.so(8)
    r"|Error loading shared library (?P<musl>\S+): No such file"
    r"|Library not loaded: (?P<macos>\S+)"
)

# mongod's exit codes: https://www.mongodb.com/docs/manual/reference/exit-codes/
_EXIT_PORT_IN_USE: Final = 48
_EXIT_OTHER_VERSION: Final = 62
_EXIT_EXCEPTION: Final = 100  # the folder is in use, and much else: the log tells which


def find_mongod() -> Path:
    """Return the mongod on PATH, else that of an installed wheel, else raise NoMongod. Downloads nothing."""
    if os.name != "posix":
        raise NoMongod("the embedded server runs on Linux and macOS", platform=_platform())
    on_path = shutil.which("mongod")
    if on_path:
        return Path(on_path).resolve()
    # The wheel adds `db/bin/mongod` to the package `fiftyone`; looked up without importing that, which may be huge.
    spec = importlib.util.find_spec("fiftyone")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(location, "db", "bin", "mongod")
        if binary.is_file():
            return binary.resolve()
    raise NoMongod("there is none on PATH and no installed wheel carries one", platform=_platform())


def check_mongod(binary: Path) -> None:
    """Return when `binary` runs here; raise MissingLibrary or NoMongod, with the reason, when it does not.

    Costs 20 ms, spent before a folder is touched.
    """
    try:
        done = subprocess.run(
            [binary, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            env=small_environment(),
            check=False,
        )
    except OSError as error:
        # ENOEXEC: another kind of machine. ENOENT although it is there: another C library's program loader.
        raise NoMongod(f"{binary} cannot be run ({error.strerror})", platform=_platform(), binary=binary) from error
    missing = _MISSING_LIBRARY.search(done.stderr)
    if missing:
        library = Path(next(name for name in missing.groups() if name)).name
        raise MissingLibrary(library, package=PACKAGES.get(library), binary=binary)
    if done.returncode == -signal.SIGILL:
        raise NoMongod(f"{binary} needs a processor with AVX", platform=_platform(), binary=binary)
    version = re.search(r"db version v(\d+)\.", done.stdout)
    if done.returncode or not version:
        said = (done.stderr or done.stdout).strip()[-500:] or f"exit code {done.returncode}"
        raise NoMongod(f"`{binary} --version` failed: {said}", platform=_platform(), binary=binary)
    if int(version[1]) < OLDEST:
        raise NoMongod(
            f"{binary} is MongoDB {version[1]}, and {OLDEST}.0 is the oldest that will do",
            platform=_platform(),
            binary=binary,
        )


def mongod_command(
    binary: Path, *, folder: Path, port: int, replica_set: str, cache_bytes: int, parameters: Mapping[str, str]
) -> list[str]:
    """The command line of one small node, listening on 127.0.0.1 only and logging to its standard output."""
    all_parameters = {
        "diagnosticDataCollectionEnabled": "false",  # nobody reads the diagnostics of a throw-away server
        "shutdownTimeoutMillisForSignaledShutdown": "0",  # else a primary waits up to 15 s for somebody to take over
        **parameters,
    }
    return [
        str(binary),
        *("--dbpath", str(folder)),
        *("--bind_ip", "127.0.0.1"),
        *("--port", str(port)),
        *("--replSet", replica_set),
        "--nounixsocket",
        *("--wiredTigerCacheSizeGB", f"{cache_bytes / 2**30:g}"),
        *("--oplogSize", "256"),  # MB; on disk it grows only as it fills
        # 11 MB on disk for an empty node; the default journal allocates 300 MB before the first write.
        *("--wiredTigerEngineConfigString", "log=(file_max=32MB,prealloc=false)"),
        *(part for name, value in all_parameters.items() for part in ("--setParameter", f"{name}={value}")),
    ]


def explain_exit(exit_code: int, *, folder: Path, port: int, log: Path, log_tail: str) -> EmbeddedError:
    """Return the error that says, as plainly as is known, why a mongod ended before it answered."""
    if exit_code == _EXIT_PORT_IN_USE:
        return PortInUse(port)
    if exit_code == _EXIT_EXCEPTION and "DBPathInUse" in log_tail:
        return FolderInUse(folder)
    if exit_code == _EXIT_OTHER_VERSION:
        return FolderUnusable(folder, "its data was written by a version of MongoDB that this mongod cannot go on from")
    ended = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return StartFailed(ended, exit_code=exit_code, log=log, log_tail=log_tail)


def _platform() -> str:
    return f"{platform.system()} {platform.machine()}"
