"""A durable saga executor on MongoDB: define a saga in ordinary async Python, start runs, and let workers finish them.

fulfil_order = Saga("fulfil-order", Order)      steps, one pivot, compensations
await Client(store).start(fulfil_order, order)  starts a run, durably
await Worker(store, [fulfil_order]).run()       finishes it, whatever dies on the way
"""

from __future__ import annotations

from sagas.client import Client, Run
from sagas.definition import Fate, Saga, Step, StepDefinition
from sagas.errors import (
    CannotOpen,
    ClientClosed,
    DefinitionError,
    ErrorDetail,
    FenceLost,
    InvalidInput,
    KeyConflict,
    KeyDenied,
    KeyLost,
    KeyRefused,
    KeyUnavailable,
    NoKeyring,
    NonRetryable,
    NoTenantDatabase,
    OperatorRefused,
    PayloadTooLarge,
    ResultTimeout,
    Retryable,
    RunDidNotComplete,
    RunFailed,
    RunHeld,
    RunNotFound,
    RunRolledBack,
    SagaError,
    SchemaMismatch,
    StartRefused,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    Tampered,
    Unreadable,
    UnreadableRun,
    UnsafeServer,
)
from sagas.keykeeping import KeyKeeper, KeyUsage, Rewrap
from sagas.keyring import Keyring
from sagas.limits import Limits
from sagas.operator import BulkResult, Operator
from sagas.policy import RetryPolicy
from sagas.shown import JournalLine, RunInfo, RunPage
from sagas.starting import Start
from sagas.stopping import StopAnswer, StopMany, StopOutcome, StopPreview, Undo
from sagas.tenant_worker import TenantWorker
from sagas.worker import Worker, WorkerOptions
from sagas.wrapping import LocalKeyWrapper
from sagas_store import MongoStore
from sagas_store.entries import Kind
from sagas_store.keys import KeyRecord, KeyState
from sagas_store.records import HeldGroup
from sagas_store.states import HELD, OPEN, SETTLED, State
from sagas_store.tenants import TenantDatabases

__all__ = [
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
