"""The client: starts runs, waits for results, reads runs and journals. Needs none of a worker's settings.

Longer than other modules: many short verbs on one thing, of which each stands by itself.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Generic, Self, TypeVar

from pydantic import BaseModel

from sagas.choosing import (
    StatesGiven,
    check_context,
    check_limit,
    check_run_id,
    check_saga,
    choose_runs,
    choose_states,
    pages,
    read_run,
)
from sagas.clock import new_token
from sagas.definition import Saga
from sagas.errors import (
    CannotOpen,
    ClientClosed,
    ErrorDetail,
    InvalidInput,
    KeyConflict,
    ResultTimeout,
    RunFailed,
    RunHeld,
    RunNotFound,
    RunRolledBack,
    SagaError,
    Unreadable,
)
from sagas.identity import run_id_of
from sagas.keyring import WORDS_PATIENCE_S, ClaimRound, Keyring, keys_of, opened_text, refuse_unkeyed
from sagas.limits import Limits
from sagas.payload import dump_text, is_same_context, load_context, load_error, load_json, load_text
from sagas.restwatch import rest_watch_of
from sagas.sealing import Slot, place_of_newest_context, place_of_payload, place_of_reason
from sagas.shown import JournalLine, RunInfo, RunPage
from sagas.starting import Start, deadline_from, due_from
from sagas.stopping import StopAnswer, StopMany, StopOutcome, StopPreview, answer, preview
from sagas.tenancy import Reach, store_of
from sagas.texts import check_text, check_words
from sagas_store import MongoStore
from sagas_store.drivers import check_session
from sagas_store.entries import OF_ERRORS, Cause, Entry, Kind
from sagas_store.errors import RunExists
from sagas_store.inputs import check_flag, check_kind, check_several, given_or
from sagas_store.numbers import NONE, check_duration
from sagas_store.records import NewRun, RunPosition, RunRecord
from sagas_store.states import HELD, OPEN, SETTLED, State
from sagas_store.tenants import TenantDatabases

__all__ = ["Client", "Run"]

C = TypeVar("C", bound=BaseModel)

_STARTS: Final = "[Start(order, key=...)]"
_BATCH_MAX: Final = 1000
_COMPARED_MAX: Final = 100
_PAGE_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class _Given:
    """What was given for a start, checked as far as that can be done without the database."""

    start: Start[Any]
    tenant: str | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class _Asked:
    """A start that was checked, and is not sealed yet."""

    run_id: str
    key: str | None
    tenant: str | None
    payload: bytes
    at: datetime
    due_at: datetime
    deadline: datetime | None


class Client:
    """Starts and observes runs. `run = await Client(store).start(fulfil_order, order, key="order-10248")`."""

    def __init__(
        self, store: MongoStore | TenantDatabases, *, tenant: str | None = None, limits: Limits | None = None
    ) -> None:
        """`limits` should be the workers': what they could not journal should not be started.

        With a `tenant` it is bound: it starts, sees and stops that tenant's runs alone. Unbound, it reaches all.
        """
        self._reach = Reach(tenant)
        self._store = store_of(store, tenant, "Client")
        self._keys = keys_of(self._store)
        self._limits = given_or("limits", limits, Limits)
        self._closed = False

    async def close(self) -> None:
        """End the waits for results. The database client is the application's to close."""
        self._closed = True
        await rest_watch_of(self._store).close(self)

    async def __aenter__(self) -> Self:
        """Use as a context manager to close it at the end."""
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---------------------------------------------------------------- starting

    async def start(
        self,
        saga: Saga[C],
        context: C,
        *,
        key: str | None = None,
        due_at: datetime | None = None,
        delay: timedelta | float | None = None,
        deadline: datetime | timedelta | float | None = None,
        tenant: str | None = None,
        session: Any = None,
    ) -> Run[C]:
        """Start a run, durably, and return its handle. With a `key`, at most one run of the saga (and tenant) has it.

        The same key with the same input returns the run that is there (`created` is False), however often and from
        wherever it is asked; with another input it raises KeyConflict. `due_at` (an aware datetime) or `delay` (a
        timedelta, or seconds) say when it may begin; the default is now. `deadline` (an aware datetime, or how long
        from now; default: the saga's) says until when the pivot must be reached, else the run is undone (`timed_out`).
        With `session`, the run exists if and only if the caller's transaction, which is under way, commits.
        Raises InvalidInput, PayloadTooLarge, DefinitionError, StoreUnavailable (start again with the same key),
        UnreadableRun when the run that the key has started cannot be compared; with a keyring also CannotOpen, when the
        tenant's key cannot be had.
        """
        given = self._given(saga, Start(context, key, due_at, delay, deadline, tenant))
        if session is not None:
            check_session(session)
        await self._store.ready()
        asked = await self._asked(saga, given)
        run = await self._sealed(saga, asked)
        created = True
        try:
            if session is not None:
                await self._store.runs.insert_in(session, run)
            else:
                await self._store.runs.insert(run)
        except RunExists:
            stored = await self._store.runs.get(run.run_id, with_input=True)
            if stored is None and session is not None:  # started by this very transaction: nobody else sees it yet
                stored = await self._store.runs.get_in(session, run.run_id)
            await self._same_input(saga, asked, stored)
            created = False
        return Run(self, saga, run.run_id, created=created)

    async def start_many(self, saga: Saga[C], starts: Iterable[Start[C]]) -> list[Run[C]]:
        """Start many runs, many per write, and return their handles in the same order.

        Idempotent like `start`. Everything is validated before anything is stored. A KeyConflict is raised after all
        the others were started, so repeating the call without the conflicting one is safe.
        """
        given = [self._given(saga, start) for start in check_several("starts", starts, "Start objects", _STARTS)]
        await self._store.ready()
        asked = [await self._asked(saga, one) for one in given]
        distinct: dict[str, _Asked] = {}
        for one in asked:
            if not is_same_context(saga.context, distinct.setdefault(one.run_id, one).payload, one.payload):
                raise KeyConflict(saga.name, one.key or "", one.run_id)
        for tenant in {one.tenant for one in asked}:
            await self._keys.sealer(tenant, "")  # a key that cannot be had is told before anything is stored
        existing: set[str] = set()
        new = list(distinct.values())
        for begin in range(0, len(new), _BATCH_MAX):
            # Sealed now, not all at once before: a key may be rotated and discarded while a long list is inserted.
            batch = [await self._sealed(saga, one) for one in new[begin : begin + _BATCH_MAX]]
            existing |= await self._store.runs.insert_many(batch)
        compared = [one for one in new if one.run_id in existing]
        for begin in range(0, len(compared), _COMPARED_MAX):
            there = compared[begin : begin + _COMPARED_MAX]
            stored = await self._store.runs.get_many([one.run_id for one in there], with_input=True)
            for one in there:
                await self._same_input(saga, one, stored.get(one.run_id))
        return [Run(self, saga, one.run_id, created=one.run_id not in existing) for one in asked]

    def _given(self, saga: Saga[C], start: Start[C]) -> _Given:
        check_saga(saga)
        check_kind("starts", start, Start, _STARTS)
        payload = check_context(saga, start.context, self._limits, sealed=self._store.keyring is not None)
        return _Given(start, self._reach.choose(start.tenant), payload)

    async def _asked(self, saga: Saga[C], given: _Given) -> _Asked:
        refuse_unkeyed(self._store, "without its key this run's would lie in the clear")
        start = given.start
        now = self._store.clock.now()
        due_at = due_from(now, start)
        deadline = deadline_from(now, due_at, start.deadline if start.deadline is not None else saga.deadline)
        run_id = await self._run_id(saga.name, start.key, given.tenant) if start.key is not None else new_token()
        return _Asked(run_id, start.key, given.tenant, given.payload, now, due_at, deadline)

    async def _sealed(self, saga: Saga[C], asked: _Asked) -> NewRun:
        sealer = await self._keys.sealer(asked.tenant, asked.run_id)
        sealed = sealer.key_id is not None
        return NewRun(
            run_id=asked.run_id,
            saga=saga.name,
            version=saga.version,
            fingerprint=saga.fingerprint,
            input=sealer.seal(Slot.INPUT, 0, asked.payload),
            created_at=asked.at,
            due_at=asked.due_at,
            tenant=asked.tenant,
            key=None if sealed else asked.key,
            sealed_key=sealer.seal(Slot.KEY, 0, dump_text(asked.key)) if sealed and asked.key is not None else None,
            keys=(sealer.key_id,) if sealer.key_id is not None else (),
            deadline=asked.deadline,
        )

    async def _run_id(self, saga: str, key: str, tenant: str | None) -> str:
        lookup = await self._keys.lookup_key(tenant)
        return lookup.run_id(saga, key) if lookup is not None else run_id_of(saga, key, tenant)

    async def _same_input(self, saga: Saga[C], asked: _Asked, stored: RunRecord | None) -> None:
        """The run exists: fine if it was started with the same input, however that was written then."""
        if stored is None:
            raise RunNotFound(asked.run_id)
        same = False
        opener = await self._keys.opener(stored.tenant, asked.run_id, [stored.input])
        with contextlib.suppress(Unreadable):
            same = is_same_context(saga.context, opener.open(Slot.INPUT, 0, stored.input), asked.payload)
        if not same:
            raise KeyConflict(saga.name, asked.key or "", asked.run_id)

    # ---------------------------------------------------------------- reading

    async def get(self, run_id: str) -> RunInfo:
        """A run as a majority has it. Raises RunNotFound, UnreadableRun, InvalidInput."""
        return await self._info(await self._record(run_id))

    def run(self, saga: Saga[C], *, run_id: str) -> Run[C]:
        """A handle on a run that was started before. Asks nothing yet. Raises InvalidInput."""
        return Run(self, check_saga(saga), check_run_id(run_id), created=False)

    async def find(self, saga: Saga[C], *, key: str, tenant: str | None = None) -> Run[C]:
        """A handle on the run of this saga with this key.

        Raises RunNotFound, UnreadableRun, InvalidInput, CannotOpen.
        """
        check_saga(saga)
        return Run(self, saga, await self.find_id(saga.name, key=key, tenant=tenant), created=False)

    async def find_id(self, saga: str, *, key: str, tenant: str | None = None) -> str:
        """The id of the run with this key of the saga of this name, for whoever has no definition at hand.

        Raises as `find` does.
        """
        check_text("saga", saga)
        check_text("key", key, least=1)
        tenant = self._reach.choose(tenant)
        await self._store.ready()
        run_id: str | None = None
        # To look is no reason to make keys, for a name that may be mistyped.
        if not isinstance(self._keys, Keyring) or await self._keys.keys(tenant):
            run_id = await self._run_id(saga, key, tenant)
            with contextlib.suppress(RunNotFound):
                return (await self._record(run_id)).run_id
        refuse_unkeyed(self._store, "without its key no run is found by its idempotency key")
        whose = f"of tenant {tenant!r}" if tenant is not None else "without a tenant"
        raise RunNotFound(run_id, f"saga {saga!r}: a run {whose} with this key", key=key)

    async def context(self, run_id: str) -> Any:
        """The newest context of a run, which is its payload: what its JSON says, not validated.

        Once the run is completed it is the result. Raises RunNotFound, UnreadableRun, CannotOpen, Unreadable.
        """
        run = await read_run(self._store, self._reach, run_id, with_input=True)
        seq, stored = await self._store.journal.last_context(run_id) or (None, run.input)
        opener = await self._keys.opener(run.tenant, run_id, [stored])
        return load_json(opener.open(*place_of_newest_context(seq), stored), f"run {run_id}: context")

    async def runs(
        self,
        *,
        state: StatesGiven | None = None,
        tenant: str | None = None,
        saga: str | None = None,
        after: str | None = None,
        limit: int = 50,
        open_keys: bool = False,
    ) -> RunPage:
        """Runs, newest first, a page at a time; held ones with `state="held"`. No payload is read. Raises InvalidInput.

        Idempotency keys that are sealed, and reasons, are left out, unless `open_keys` asks for them: that may need the
        key service.
        Pages by position, not by number: runs started meanwhile neither repeat nor hide any.
        """
        check_limit(limit, _PAGE_MAX)
        check_flag("open_keys", open_keys)
        states = choose_states("state", state if state is not None else State)
        chosen = choose_runs(self._store, self._reach, states, tenant=tenant, saga=saga)
        position = _position(after) if after is not None else None
        await self._store.ready()
        found = await self._store.runs.page(chosen, after=position, limit=limit + 1)
        page = found[:limit]
        more = len(found) > limit
        infos = await asyncio.gather(*map(self._info, page)) if open_keys else [RunInfo.of(record) for record in page]
        return RunPage(infos, _cursor(page[-1]) if more else None)

    async def _info(self, record: RunRecord) -> RunInfo:
        """The run with the words that are stored with it, as far as they open."""
        stored = {
            Slot.KEY: record.sealed_key,
            Slot.STOP: record.stop.reason if record.stop is not None else None,
            Slot.RESTART: record.started_reason,
        }
        opened = await asyncio.gather(*(opened_text(self._keys, record, slot, 0, one) for slot, one in stored.items()))
        return RunInfo.of(record, dict(zip(stored, opened, strict=True)))

    # ---------------------------------------------------------------- stopping

    async def stop(self, run_id: str, *, by: str, reason: str) -> StopAnswer:
        """Press Stop. The answer is final and comes at once: cancelled, will be undone, or refused, and why.

        It is decided in the one write that records it: before the pivot's gate everything will be undone, after it the
        run completes forward. Asked again, the first stop's answer comes back. Raises RunNotFound, UnreadableRun,
        InvalidInput, and StoreUnavailable, after which asking again tells what was decided.
        """
        check_words(by, reason)
        run = await self._record(run_id)
        sealed, key_id = await self._sealed_for_stop(run, reason)
        while True:
            first = await self._store.interventions.ask_stop(run_id, by=by, reason=sealed, key_id=key_id)
            run = await self._record(run_id)
            if run.stop is not None or run.state in SETTLED:
                break  # else an operator has let it go on between asking and looking: now it can be stopped
        if first:
            said = reason if sealed is not None else None
        else:
            stored = run.stop.reason if run.stop is not None else None
            said = (await opened_text(self._keys, run, Slot.STOP, 0, stored)).text
        return answer(run, first=first, reason=said)

    async def _sealed_for_stop(self, run: RunRecord, reason: str) -> tuple[bytes | None, str | None]:
        """The reason as it is stored, and its key; None where it cannot be sealed: a stop does not wait for a key."""
        try:
            async with asyncio.timeout(WORDS_PATIENCE_S):
                sealer = await self._keys.sealer(run.tenant, run.run_id)
        except (CannotOpen, TimeoutError):
            return None, None
        if sealer.key_id is None and run.keys:
            return None, None  # this client has no keyring, and nothing of this run may lie in the clear
        return sealer.seal(Slot.STOP, 0, dump_text(reason)), sealer.key_id

    async def preview_stop(self, run_id: str) -> StopPreview:
        """What a stop would do now: the compensations in order, or the refusal and why. Only reads.

        Raises RunNotFound, UnreadableRun.
        """
        run = await self._record(run_id)
        return preview(run, await self._store.journal.load(run_id))

    async def stop_many(
        self,
        *,
        by: str,
        reason: str,
        tenant: str | None = None,
        saga: str | None = None,
        key_prefix: str | None = None,
        started_before: datetime | None = None,
        limit: int = 100_000,
        dry_run: bool = False,
    ) -> StopMany:
        """Press Stop on every run that fits and has not ended, fifty at once; a dry run previews each.

        One run's failure stops none of the others; it is told in `failed`. Raises InvalidInput.
        """
        check_words(by, reason)
        check_limit(limit)
        check_flag("dry_run", dry_run)
        chosen = choose_runs(
            self._store,
            self._reach,
            OPEN | HELD,
            tenant=tenant,
            saga=saga,
            key_prefix=key_prefix,
            started_before=started_before,
            stopped=False,
        )
        await self._store.ready()
        result = StopMany(dry_run)
        async for page in pages(self._store, chosen, limit=limit):
            outcomes = await asyncio.gather(*(self._stop_one(run_id, by, reason, dry_run=dry_run) for run_id in page))
            for run_id, outcome in zip(page, outcomes, strict=True):
                if isinstance(outcome, SagaError):
                    result.failed[run_id] = str(outcome)
                else:
                    result.answers.setdefault(outcome, []).append(run_id)
        return result

    async def _stop_one(self, run_id: str, by: str, reason: str, *, dry_run: bool) -> StopOutcome | SagaError:
        try:
            if dry_run:
                return (await self.preview_stop(run_id)).outcome
            return (await self.stop(run_id, by=by, reason=reason)).outcome
        except SagaError as failed:  # the account of what was done is worth more than the exception
            return failed

    async def journal(self, run_id: str) -> list[JournalLine]:
        """The timeline of one run, oldest first. Raises RunNotFound, UnreadableRun.

        What is sealed and cannot be opened is left out line by line, and `unopened` says why.
        """
        record = await self._record(run_id)
        return await self._lines(record, await self._store.journal.load(run_id))

    async def _lines(self, run: RunRecord, journal: list[Entry]) -> list[JournalLine]:
        together = ClaimRound()  # a key that is away is asked for once, not once per line
        return [await self._line(run, entry, together) for entry in journal]

    async def _line(self, run: RunRecord, entry: Entry, together: ClaimRound) -> JournalLine:
        what = f"run {entry.run_id}, entry {entry.seq}"
        error: ErrorDetail | None = None
        reason: str | None = None
        unopened: str | None = None
        failed = entry.payload if entry.kind in OF_ERRORS else None
        try:
            # A line by itself: what is wrong with one hides nothing of the others.
            opener = await self._keys.opener(run.tenant, run.run_id, [failed, entry.reason], claim_round=together)
            if failed is not None:
                error = load_error(opener.open(*place_of_payload(entry.kind, entry.seq), failed), what)
            if entry.reason is not None:
                reason = load_text(opener.open(*place_of_reason(entry.kind, entry.seq), entry.reason), what)
        except (CannotOpen, Unreadable) as cannot:
            unopened = str(cannot)
        return JournalLine(
            seq=entry.seq,
            at=entry.at,
            kind=entry.kind,
            step=entry.step,
            try_number=entry.try_number,
            attempt=entry.attempt,
            worker=entry.worker,
            next=entry.next,
            due_at=entry.due_at,
            in_doubt=entry.in_doubt,
            error=error,
            happened=entry.payload is not None if entry.kind in (Kind.PROBE_SUCCEEDED, Kind.VERDICT) else None,
            by=entry.by,
            reason=reason,
            unopened=unopened,
        )

    async def _record(self, run_id: str) -> RunRecord:
        return await read_run(self._store, self._reach, run_id)

    async def _result(self, saga: Saga[C], run_id: str, timeout: float | timedelta | None) -> C:
        limit = check_duration("timeout", timeout, least=NONE, most=timedelta.max) if timeout is not None else None
        ends_at = asyncio.get_running_loop().time() + limit.total_seconds() if limit is not None else None
        record = await self._record(run_id)
        if record.saga != saga.name:
            # Its result may well fit this saga's model, and would be taken for this saga's.
            raise InvalidInput("saga", f"run {run_id} is of saga {record.saga!r}, not of {saga.name!r}")
        if record.state not in OPEN:
            return await self._outcome(saga, record)
        while True:
            timed_out = False
            try:
                if self._closed:
                    raise ClientClosed(run_id)
                await rest_watch_of(self._store).wait(self, run_id, ends_at)
            except TimeoutError:
                timed_out = True
            record = await self._record(run_id)
            if record.state not in OPEN:
                return await self._outcome(saga, record)
            if timed_out:
                raise ResultTimeout(run_id, limit or NONE, record.state)
            # It was at rest, and an operator has let it go on since: wait on.

    async def _outcome(self, saga: Saga[C], record: RunRecord) -> C:
        if record.state is State.COMPLETED:
            seq, stored = await self._store.journal.last_context(record.run_id) or (0, b"")
            opener = await self._keys.opener(record.tenant, record.run_id, [stored])
            payload = opener.open(Slot.CONTEXT, seq, stored)
            return load_context(saga.context, payload, f"run {record.run_id}: result")
        if record.held is not None and record.state in HELD:
            raise RunHeld(record.run_id, record.state, record.held.reason, record.held.since)
        journal = await self._store.journal.load(record.run_id)
        begun = next((entry for entry in journal if entry.kind is Kind.ROLLBACK_BEGUN), None)
        if begun is not None and begun.step is None:
            reason = _REASONS[begun.cause or Cause.STOP]
            raise RunRolledBack(record.run_id, record.state, reason)
        failed = next((entry for entry in reversed(journal) if entry.kind is Kind.STEP_FAILED), None)
        if failed is None:  # stopped before anything ran, so there is nothing in the journal
            raise RunRolledBack(record.run_id, record.state, _REASONS[Cause.STOP])
        (line,) = await self._lines(record, [failed])
        error = line.error
        reason = f"step {failed.step} failed" + (f" with {error.type}" if error else "")
        reason += f" (with what is sealed: {line.unopened})" if line.unopened else ""
        kind = RunFailed if record.state is State.FAILED else RunRolledBack
        raise kind(record.run_id, record.state, reason, step=failed.step, error=error)


_REASONS: Final = {
    Cause.STEP_FAILED: "a step failed",
    Cause.STOP: "a stop was honoured",
    Cause.DEADLINE: "the deadline passed",
}


class Run(Generic[C]):
    """A handle on one run."""

    def __init__(self, client: Client, saga: Saga[C], run_id: str, *, created: bool) -> None:
        self._client = client
        self._saga = saga
        self.run_id: Final = run_id
        """By which it is found again: `Client.run`, `sagas show`."""
        self.created: Final = created
        """Whether this very call started it, as far as is known; False where it existed before."""

    def __repr__(self) -> str:
        return f"Run({self._saga.name!r}, {self.run_id!r})"

    async def result(self, timeout: float | timedelta | None = None) -> C:
        """Wait until the run comes to rest and return its last context, at most for `timeout`; None waits for ever.

        `timeout` is a timedelta, or seconds. Raises RunRolledBack, RunFailed or RunHeld with what happened,
        ResultTimeout when it is still going on, RunNotFound, UnreadableRun, InvalidInput when it is a run of another
        saga, ClientClosed when the client is closed meanwhile. All who wait through one store share one change stream
        and one poll.
        """
        return await self._client._result(self._saga, self.run_id, timeout)  # noqa: SLF001 - one subject in two classes

    async def stop(self, *, by: str, reason: str) -> StopAnswer:
        """Press Stop; see `Client.stop`."""
        return await self._client.stop(self.run_id, by=by, reason=reason)

    async def preview_stop(self) -> StopPreview:
        """What a stop would do now; only reads."""
        return await self._client.preview_stop(self.run_id)

    async def info(self) -> RunInfo:
        """Where it stands now."""
        return await self._client.get(self.run_id)

    async def journal(self) -> list[JournalLine]:
        """Its timeline, oldest first."""
        return await self._client.journal(self.run_id)


def _cursor(record: RunRecord) -> str:
    position = json.dumps([record.created_at.isoformat(), record.run_id])
    return base64.urlsafe_b64encode(position.encode()).decode()


def _position(cursor: object) -> RunPosition:
    try:
        created_at, run_id = json.loads(base64.urlsafe_b64decode(check_text("after", cursor)))
        position = RunPosition(datetime.fromisoformat(created_at), str(run_id))
    except (ValueError, TypeError):
        raise InvalidInput("after", "is not a `next` of an earlier page") from None
    if position.created_at.tzinfo is None:
        raise InvalidInput("after", "is not a `next` of an earlier page")
    return position
