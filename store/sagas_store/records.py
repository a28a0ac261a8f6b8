"""A run as the store takes, keeps and gives it: the records that others see, and the document that each is made of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from sagas_store.clock import EPOCH, new_token
from sagas_store.drivers import Document
from sagas_store.errors import UnreadableRun
from sagas_store.states import Decision, Phase, State

__all__ = [
    "Blocked",
    "Claim",
    "Held",
    "HeldGroup",
    "NewRun",
    "Renewal",
    "RunFilter",
    "RunPosition",
    "RunRecord",
    "Stop",
    "new_document",
    "readable_part",
    "record_of",
    "state_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """What a run is started with."""

    run_id: str
    saga: str
    version: int
    fingerprint: str
    input: bytes
    created_at: datetime
    due_at: datetime
    key: str | None = None
    sealed_key: bytes | None = None
    """The idempotency key, sealed, where it must not lie in the clear."""
    tenant: str | None = None
    keys: tuple[str, ...] = ()
    """Ids of the data keys that its payloads are sealed with."""
    deadline: datetime | None = None
    restarted_from: str | None = None
    """The run that this one was started from anew."""
    started_by: str | None = None
    started_reason: bytes | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to drive a run, proven by `token`; all runs claimed in one batch share it."""

    token: str
    worker: str
    attempt: int
    taken_from: State
    """`pending`: fresh, parked or handed back. `running`: the lease of the attempt before had lapsed."""
    at: datetime
    """The server's clock when the claim was made."""


@dataclass(frozen=True, slots=True)
class Held:
    """Why a run is held, in words without payloads, and since when."""

    reason: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """Why the last claims of a run could not open its payloads. Gone with the next claim that can."""

    count: int
    """Claims that found the key lost. An operator's requeue keeps it."""
    since: datetime
    failure: str
    why: str
    """In words without payloads."""
    key_id: str | None = None
    denied_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """A person's stop, and what was decided of it at the moment of pressing."""

    decision: Decision
    by: str
    reason: bytes | None
    """None where it could not be sealed when the stop was asked."""
    asked_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as the database has it. Times are the server's, aware UTC."""

    run_id: str
    saga: str
    version: int
    fingerprint: str
    key: str | None
    state: State
    phase: Phase
    attempts: int
    created_at: datetime
    due_at: datetime | None
    settled_at: datetime | None
    gate_passed_at: datetime | None
    claim: Claim | None
    """The claim it is held under, or the last one."""
    held: Held | None
    input_read: bytes | None = field(repr=False)
    """None where the question did not ask for it; `input` is what it is used by."""
    tenant: str | None = None
    keys: tuple[str, ...] = ()
    """Ids of the data keys that any of its payloads is sealed with."""
    sealed_key: bytes | None = None
    blocked: Blocked | None = None
    stop: Stop | None = None
    deadline: datetime | None = None
    overdue: bool = False
    """The deadline passed after the gate; the run goes on."""
    restarted_from: str | None = None
    started_by: str | None = None
    started_reason: bytes | None = None
    unreadable: tuple[str, ...] = ()
    """Fields that this version cannot read, by a newer one or damaged: as good as not there. Only where runs are read
    together; whoever asks for one is told UnreadableRun."""

    @property
    def input(self) -> bytes:
        """What it was started with. Every run has one, so not to have read it is a mistake."""
        if self.input_read is None:
            raise RuntimeError(f"run {self.run_id} was read without its input")
        return self.input_read


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a worker learns when it renews its leases."""

    lost: frozenset[str]
    """Runs that are no longer held under their token: stop working on those, write nothing."""
    stopped: frozenset[str]
    """Runs with a stop recorded, seen before or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Which runs a list or a bulk verb means. The states are served by an index, the rest narrows what it finds."""

    states: frozenset[State]
    tenant: str | None = None
    saga: str | None = None
    key_prefix: str | None = None
    created_before: datetime | None = None
    stopped: bool | None = None
    """Only runs with (or without) a stop recorded."""
    blocked: bool | None = None
    """Only runs whose last claim could not open them (or could)."""
    tenanted: bool | None = None
    """Only runs that have (or have not) a tenant."""
    waiting: bool = False
    """Only parked runs: they have begun, and the time of their retry has not come."""


@dataclass(frozen=True, slots=True)
class HeldGroup:
    """Held or blocked runs that have something in common."""

    state: State
    tenant: str | None
    key_id: str | None
    failure: str | None
    count: int
    since: datetime
    """Since when the first of them is held, or does not open."""


@dataclass(frozen=True, slots=True)
class RunPosition:
    """A place in the list of runs, newest first: the page continues after it."""

    created_at: datetime
    run_id: str


def new_document(run: NewRun) -> Document:
    document: Document = {
        "_id": run.run_id,
        "saga": run.saga,
        "version": run.version,
        "fingerprint": run.fingerprint,
        "state": State.PENDING,
        "phase": Phase.FORWARD,
        "attempts": 0,
        "created_at": run.created_at,
        "due_at": run.due_at,
        "input": run.input,
        # Tells a run of ours whose reply was lost from one that somebody else has started under the same key.
        "token": new_token(),
    }
    for name in ("tenant", "key", "sealed_key", "deadline", "restarted_from", "started_by", "started_reason"):
        if (value := getattr(run, name)) is not None:
            document[name] = value
    if run.keys:
        document["keys"] = list(run.keys)
    return document


_UNREADABLE: Final = (AttributeError, KeyError, TypeError, ValueError)
_BLANK: Final[Document] = {
    "saga": "",
    "version": 0,
    "fingerprint": "",
    "state": State.BROKEN,
    "phase": Phase.UNKNOWN,
    "attempts": 0,
    "created_at": EPOCH,
}
"""What every run has, where it cannot be read."""


def record_of(document: Document) -> RunRecord:
    """The run. Raises UnreadableRun."""
    run = readable_part(document)
    if run.unreadable:
        raise UnreadableRun(run.run_id, run.unreadable)
    return run


def readable_part(document: Document) -> RunRecord:
    """The run, as far as this version can read it, so that it harms none that is read together with it."""
    try:
        return _read(document)
    except _UNREADABLE:
        pass
    kept = {"_id": document["_id"], **_BLANK}
    unreadable = _BLANK.keys() - document.keys()
    for name, value in document.items():
        try:
            _read({**kept, name: value})
        except _UNREADABLE:
            unreadable.add(name)
        else:
            kept[name] = value
    return replace(_read(kept), unreadable=tuple(sorted(unreadable)))


def state_of(word: str) -> State:
    """The state; one that this version does not know counts as held, since it may owe work."""
    try:
        return State(word)
    except ValueError:
        return State.BROKEN


def _read(document: Document) -> RunRecord:
    claim: Any = document.get("claim")
    held: Any = document.get("held")
    stop: Any = document.get("stop")
    blocked = document.get("blocked")
    payload, sealed_key = document.get("input"), document.get("sealed_key")
    started_reason = document.get("started_reason")
    return RunRecord(
        run_id=document["_id"],
        saga=document["saga"],
        version=document["version"],
        fingerprint=document["fingerprint"],
        key=document.get("key"),
        state=State(document["state"]),
        phase=Phase(document["phase"]),
        attempts=document["attempts"],
        created_at=document["created_at"],
        due_at=document.get("due_at"),
        settled_at=document.get("settled_at"),
        gate_passed_at=document.get("gate_passed_at"),
        claim=Claim(
            token=claim["token"],
            worker=claim["worker"],
            attempt=document["attempts"],
            taken_from=State(claim["taken_from"]),
            at=claim["at"],
        )
        if claim
        else None,
        held=Held(held["reason"], held["since"]) if held else None,
        tenant=document.get("tenant"),
        keys=tuple(document.get("keys", ())),
        sealed_key=bytes(sealed_key) if sealed_key is not None else None,
        blocked=_blocked(blocked) if blocked else None,
        stop=_stop(stop) if stop else None,
        deadline=document.get("deadline"),
        overdue=document.get("overdue", False),
        restarted_from=document.get("restarted_from"),
        started_by=document.get("started_by"),
        started_reason=bytes(started_reason) if started_reason is not None else None,
        input_read=bytes(payload) if payload is not None else None,
    )


def _blocked(document: Document) -> Blocked:
    return Blocked(
        count=document["count"],
        since=document["since"],
        failure=document["failure"],
        why=document["why"],
        key_id=document.get("key_id"),
        denied_since=document.get("denied_since"),
    )


def _stop(document: Document) -> Stop:
    reason = document.get("reason")
    return Stop(
        Decision(document["decision"]),
        document["by"],
        bytes(reason) if reason is not None else None,
        document["asked_at"],
    )
