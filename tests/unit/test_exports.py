"""What users may import. A new public name is a visible change here."""

import subprocess
import sys

import pytest

import sagas
import sagas_store

PUBLIC = [
    "HELD",
    "OPEN",
    "SETTLED",
    "BulkResult",
    "CannotOpen",
    "Client",
    "ClientClosed",
    "DefinitionError",
    "ErrorDetail",
    "Fate",
    "FenceLost",
    "HeldGroup",
    "InvalidInput",
    "JournalLine",
    "KeyConflict",
    "KeyDenied",
    "KeyKeeper",
    "KeyLost",
    "KeyRecord",
    "KeyRefused",
    "KeyState",
    "KeyUnavailable",
    "KeyUsage",
    "Keyring",
    "Kind",
    "Limits",
    "LocalKeyWrapper",
    "MongoStore",
    "NoKeyring",
    "NoTenantDatabase",
    "NonRetryable",
    "Operator",
    "OperatorRefused",
    "PayloadTooLarge",
    "ResultTimeout",
    "RetryPolicy",
    "Retryable",
    "Rewrap",
    "Run",
    "RunDidNotComplete",
    "RunFailed",
    "RunHeld",
    "RunInfo",
    "RunNotFound",
    "RunPage",
    "RunRolledBack",
    "Saga",
    "SagaError",
    "SchemaMismatch",
    "Start",
    "StartRefused",
    "State",
    "Step",
    "StepDefinition",
    "StopAnswer",
    "StopMany",
    "StopOutcome",
    "StopPreview",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "Tampered",
    "TenantDatabases",
    "TenantWorker",
    "Undo",
    "Unreadable",
    "UnreadableRun",
    "UnsafeServer",
    "Worker",
    "WorkerOptions",
]


def test_the_public_names_are_these() -> None:
    assert sagas.__all__ == PUBLIC


def test_the_stores_public_names_are_these() -> None:
    assert sagas_store.__all__ == ["MongoStore"]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_can_be_imported(name: str) -> None:
    assert getattr(sagas, name) is not None


def test_every_error_that_is_exported_is_documented_and_of_one_tree_or_for_steps_to_raise() -> None:
    for name in PUBLIC:
        value = getattr(sagas, name)
        if isinstance(value, type) and issubclass(value, BaseException):
            assert value.__doc__, name
            assert issubclass(value, sagas.SagaError) != (name in {"NonRetryable", "Retryable"}), name


def test_importing_connects_to_nothing_and_says_nothing() -> None:
    program = (
        "import socket; socket.socket.connect = None; import sagas; import threading; print(threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout == "1\n"
    assert done.stderr == ""
