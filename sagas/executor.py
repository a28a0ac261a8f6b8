"""Drives one claimed run: load, decide, perform, append, repeat.

The imperative shell around `sagas.decide`. It performs what was decided and journals what came of it; it decides
nothing itself. Three rules keep it honest:

- An outcome is journaled, durably, before anything that follows from it begins.
- Faults of the engine (the database away, the lease lost) end the attempt without a trace in the journal. They are
  never taken for a step's outcome. The lease lapses and the next attempt goes on from the journal.
- Nobody cancels this code from outside. A drain interrupts the step in hand through its own timeout scope, so a write
  of the engine's is never torn, and a compensation is never interrupted by a drain at all.

Longer than other modules: all of it is one attempt, and works on the state of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import Executor as ThreadPool
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import BaseModel

from sagas.clock import Monotonic
from sagas.decide import (
    Action,
    Activity,
    BeginRollback,
    Facts,
    Hold,
    NoteRefusal,
    PassGate,
    Perform,
    Progress,
    Refuse,
    Settle,
    Wait,
    after_failure,
    intent,
    lost_in_doubt,
    next_action,
    once_announced,
)
from sagas.definition import Part, Saga, Step, StepKind, StopAsked
from sagas.errors import CannotOpen, FenceLost, JournalMisfit, KeyUnavailable, NonRetryable, Unreadable, over_limit
from sagas.identity import compensation_key, step_key
from sagas.keyring import ClaimRound, keys_of, sealer_of
from sagas.lease import Lease
from sagas.limits import Limits
from sagas.log import EngineLog, engine_log
from sagas.payload import NotJournalable, dump_context, dump_error, load_context, type_name
from sagas.policy import Failure
from sagas.quarantine import next_hold
from sagas.sealing import Sealer, Unsealed, place_of_newest_context, place_of_payload
from sagas.timeouts import Timeouts
from sagas_store import MongoStore
from sagas_store.clock import EPOCH
from sagas_store.entries import Cause, Entry, Kind
from sagas_store.errors import StopFirst, unreadable
from sagas_store.faults import is_aborted_transaction
from sagas_store.records import Blocked, Claim, RunRecord, Stop
from sagas_store.states import Decision, Phase, State

__all__ = ["Attempt", "Executor", "Parked"]

_LONG_WAIT_S: Final = 30.0
_REREADS_MAX: Final = 8
"""How often a takeover reads the journal again because the holder before is still writing to it."""

Parked: Final = State.PENDING
"""What an attempt ends in when the run goes on later: parked for a retry, or handed back by a drain."""


@dataclass(frozen=True, slots=True)
class _Returned:
    """What a try came to: a value."""

    value: object


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a try came to: an exception, and what it means."""

    error: BaseException
    failure: Failure


@dataclass(frozen=True, slots=True)
class _Threw:
    """What a function in a thread came to: an exception."""

    error: BaseException


class _Interrupted:
    """What a try came to: broken off by a drain, so nothing is known."""


class Executor:
    """Makes attempts: what all runs of one worker share."""

    def __init__(
        self,
        store: MongoStore,
        sagas: Mapping[tuple[str, int], Saga[Any]],
        *,
        resources: object,
        threads: ThreadPool,
        thread_count: int,
        limits: Limits,
        park_after: timedelta,
        monotonic: Monotonic,
    ) -> None:
        """`park_after`: a wait longer than this frees the worker."""
        self.store = store
        self.keys = keys_of(store)
        self.sagas = sagas
        self.resources = resources
        self.threads = threads
        self.limits = limits
        self.park_after = park_after
        self.monotonic = monotonic
        # A place in the pool is waited for here, where a drain can break the waiting off and no timeout runs yet.
        self.free_threads = asyncio.Semaphore(thread_count)
        self.timeouts = Timeouts()
        self.thread_calls: set[Future[Any]] = set()
        """Plain functions that are running, also those that were broken off and cannot be ended."""

    def attempt(
        self, run: RunRecord, entries: list[Entry], lease: Lease, claim_round: ClaimRound | None = None
    ) -> Attempt:
        """One attempt at a claimed run with this journal. Runs claimed together share what is learnt of their keys."""
        return Attempt(self, run, entries, lease, claim_round)


class Attempt:
    """One claim of a run being driven by one worker."""

    def __init__(
        self, shared: Executor, run: RunRecord, entries: list[Entry], lease: Lease, claim_round: ClaimRound | None
    ) -> None:
        assert run.claim is not None, run.run_id
        self.run = run
        self.lease = lease
        self._shared = shared
        self._store = shared.store
        self._claim: Claim = run.claim
        self._saga = shared.sagas[run.saga, run.version]
        self._entries = entries
        self._progress = Progress.of(self._saga)
        self._gate_passed = run.gate_passed_at is not None
        self._claim_round = claim_round
        self._sealer: Sealer = Unsealed(run.tenant, run.run_id)
        """Of this run; the real one once its payloads were opened. Then no key service can come between an outcome and
        the journal any more."""
        self.blocked_by: CannotOpen | None = None
        """Why the run could not be opened, and was given back or quarantined."""
        self.held_because: str | None = None
        """Why the run was held, as it is stored: without payloads."""
        self._payload = b""
        """The newest context, opened."""
        self._context: BaseModel | None = None
        """The context of `_payload`, not yet handed out. A step may change it in place, so each try gets its own."""
        self._task: asyncio.Task[Any] | None = None
        """In which it is driven."""
        self._scope: asyncio.Timeout | None = None
        self._deadline_over = False
        self._stop: Stop | None = run.stop
        """The stop as far as it has been read; `_news` says that there is one to read."""
        self._news = False
        self._draining = False
        self._hurried = False
        """The drain's grace is over: no step begins any more."""
        self._facts = self._known()
        self._planned: Action | None = None
        """What the newest entry announced, as long as nothing else has become known."""
        self._nudge = asyncio.Event()
        """Ends a wait early: there is news, or a drain."""
        self._in_hand: Perform | None = None
        self._overstays_at: float | None = None
        """By the monotonic clock: when the function in hand should have ended, timed out or broken off."""
        self._stop_asked = StopAsked()
        self._broken_off = False

    # ---------------------------------------------------------------- told by the worker

    def drain(self) -> None:
        """Finish what is in hand, then hand the run back."""
        self._draining = True
        self._nudge.set()

    def interrupt(self) -> None:
        """Break off the step in hand, then hand the run back. A compensation and the pivot are left to finish."""
        self.drain()
        self._hurried = True
        action = self._in_hand
        if action is not None and not _spared(action):
            self._break_off()

    def lose(self) -> None:
        """The lease is lost: break off whatever is in hand and write nothing more."""
        self.lease.lose()
        self.drain()
        self._break_off()

    def notice_stop(self) -> None:
        """A stop was recorded on the run: read it, and act on it. Telling twice does no harm."""
        if self._stop is None and not self._news:
            self._news = True
            self._nudge.set()
            self._turn_back_soon()

    def overstays(self, now: float, patience: timedelta) -> bool:
        """Whether the function in hand should have ended longer than `patience` ago: it swallows cancellation."""
        return self._overstays_at is not None and now > self._overstays_at + patience.total_seconds()

    def _turn_back_soon(self) -> None:
        """The run will turn back, unless its gate is passed: tell the step in hand, break it off after its grace."""
        action = self._in_hand
        if self._gate_passed or action is None or action.activity is Activity.COMPENSATION:
            return
        self._stop_asked.set()
        scope = self._scope
        loop = asyncio.get_running_loop()
        loop.call_later(action.step.stop_grace.total_seconds(), lambda: self._break_off(scope))

    def _break_off(self, scope: asyncio.Timeout | None = None) -> None:
        """Break off the function in hand; with `scope`, only if it is still that one."""
        if self._scope is None or self._scope.expired() or (scope is not None and scope is not self._scope):
            return
        self._broken_off = True
        self._overstays_at = self._shared.monotonic()
        self._scope.reschedule(0)

    # ---------------------------------------------------------------- the loop

    async def drive(self) -> State:
        """Drive the run until it settles, is held, is parked or is handed back; returns the state it was left in.

        Raises FenceLost and LeaseLapsed when somebody else drives it or may, StoreUnavailable when the database does
        not answer: the attempt is over, and the journal says all there is to know.
        """
        self._task = asyncio.current_task()
        try:
            misfit = await self._load()
        except CannotOpen as error:
            return await self._block(error)
        while True:
            try:
                left_in = await self._hold(misfit) if misfit is not None else await self._advance()
                if left_in is not None:
                    return left_in
            except StopFirst:
                await self._learn()

    async def _advance(self) -> State | None:
        """Decide and do one thing; the state the run was left in when the attempt is over. Raises StopFirst too."""
        if self._news:
            await self._learn()
        action = self._planned or next_action(self._saga, self._progress, self._facts, self._now())
        self._planned = None
        match action:
            case Perform() | PassGate() if self._draining:
                return await self._park(timedelta(0))
            case Perform():
                await self._perform(action)
            case PassGate():
                self.lease.check()
                await self._pass_gate()
            case Settle(state):
                await self._store.runs.settle(self.run, state, stop_known=self._stop is not None)
                return state
            case Hold():
                return await self._hold(action)
            case Wait(until):
                return await self._wait(until)
            case BeginRollback() | Refuse() | NoteRefusal():
                await self._note(action)
        return None

    async def _note(self, action: BeginRollback | Refuse | NoteRefusal) -> None:
        """Journal what was decided without anything being performed."""
        match action:
            case Refuse(step, reason):
                await self._fail(Kind.STEP_FAILED, NonRetryable(reason), step=step.name)
            case NoteRefusal():
                assert self._stop is not None, self.run.run_id
                stop = self._stop
                await self._append(Kind.STOP_REFUSED, by=stop.by, reason=stop.reason, asked_at=stop.asked_at)
            case BeginRollback(cause, step_name):
                asked: dict[str, Any] = {}
                if cause is Cause.STOP and self._stop is not None:
                    asked = {"by": self._stop.by, "reason": self._stop.reason, "asked_at": self._stop.asked_at}
                await self._append(Kind.ROLLBACK_BEGUN, cause=cause, step=step_name, **asked)
                await self._store.runs.show_rolling_back(self.run)

    async def _pass_gate(self) -> None:
        await self._store.runs.pass_gate(self.run)
        self._gate_passed = True
        self._facts = self._known()

    async def _learn(self) -> None:
        """Read the stop that was recorded; or find that it is the deadline that shut the gate."""
        self._news = False
        if not self._draining:
            self._nudge.clear()
        record = await self._store.runs.get(self.run.run_id)
        if record is None or record.claim is None or record.claim.token != self._claim.token:
            raise FenceLost(self.run.run_id, "read the stop")
        self._stop = record.stop
        self._gate_passed = record.gate_passed_at is not None
        # By the server's clock the gate was shut although ours, which is never ahead, had the deadline still to come.
        self._deadline_over = record.stop is None and record.deadline is not None and not self._gate_passed
        self._facts = self._known()
        self._planned = None

    async def _load(self) -> Hold | None:
        """Fold the journal, announce the takeover, and find the context; or say why the run cannot be executed."""
        if self.run.unreadable:
            return Hold(State.BROKEN, unreadable(self.run.unreadable))
        if self.run.fingerprint != self._saga.fingerprint:
            return Hold(
                State.BROKEN,
                f"it was started as [{self.run.fingerprint}], and version {self._saga.version} of {self._saga.name} is "
                f"now [{self._saga.fingerprint}]; a changed saga needs a new version",
            )
        try:
            await self._take_over()
            self._context = load_context(self._saga.context, self._payload, "the context")
        except (JournalMisfit, Unreadable) as unfit:
            return Hold(State.BROKEN, str(unfit))
        return None

    async def _block(self, error: CannotOpen) -> State:
        """Give the run back for a while, or quarantine it: `sagas.quarantine` says which and for how long."""
        self.blocked_by = error
        before = self.run.blocked
        hold = next_hold(
            error.failure,
            count=before.count if before is not None else 0,
            denied_since=before.denied_since if before is not None else None,
            now=self._now(),
            lease=self.lease.length,
        )
        blocked = Blocked(
            count=hold.count,
            since=before.since if before is not None else self._now(),
            key_id=error.key_id,
            failure=type(error).__name__,
            why=error.why,
            denied_since=hold.denied_since,
        )
        reason = f"{type(error).__name__}: {error.why}" if hold.quarantine else None
        await self._store.runs.block(self.run, blocked, wait=hold.wait, quarantine=reason)
        return State.QUARANTINED if hold.quarantine else Parked

    async def _take_over(self) -> None:
        """Fold the journal, open the newest context, and, unless this is the first attempt, fence whoever was before.

        Opened first: an attempt that cannot read leaves no entry.
        """
        payload_of: dict[int | None, bytes] = {None: self.run.input}
        for reread in range(_REREADS_MAX + 1):
            if any(entry.attempt > self._claim.attempt for entry in self._entries):
                # We were frozen between claiming and reading. A later attempt has the run, and no number would stop us.
                raise FenceLost(self.run.run_id, "take over")
            for entry in self._entries[self._progress.seq :]:
                self._progress = self._progress.after(entry)
                payload_of[entry.seq] = entry.payload or b""
            await self._open(self._progress.context_seq, payload_of[self._progress.context_seq])
            if self._claim.attempt == 1:
                break
            try:
                taken_from = self._claim.taken_from
                in_doubt = lost_in_doubt(
                    self._saga, self._progress, self._facts, attempt=self._claim.attempt, taken_from=taken_from
                )
                await self._append(Kind.TAKEN_OVER, taken_from=taken_from, in_doubt=in_doubt)
                break
            except FenceLost:
                # The holder before us got an entry in after we had read. It counts; ours goes after it.
                if reread == _REREADS_MAX:
                    raise
                self._entries = await self._store.journal.load(self.run.run_id)
        self._entries = []
        if self._progress.rollback is not None and self.run.phase is not Phase.ROLLING_BACK:
            await self._store.runs.show_rolling_back(self.run)  # the attempt before died on the way to it

    async def _open(self, seq: int | None, stored: bytes) -> None:
        """Get the run's keys, and the newest context. Raises CannotOpen, Unreadable."""
        run = self.run
        self._sealer = await sealer_of(self._shared.keys, run, stored, claim_round=self._claim_round)
        self._payload = self._open_context(seq, stored)
        key_id = self._sealer.key_id
        if run.blocked is not None or (key_id is not None and key_id not in run.keys):
            await self._store.runs.note_opened(run, key_id)

    def _open_context(self, seq: int | None, stored: bytes) -> bytes:
        return self._sealer.open(*place_of_newest_context(seq), stored)

    def _known(self) -> Facts:
        limits = self._shared.limits
        decision = self._stop.decision if self._stop is not None else None
        return Facts(
            gate_passed=self._gate_passed,
            stop_asked=decision is Decision.WILL_BE_UNDONE,
            stop_refused=decision is Decision.REFUSED,
            deadline=EPOCH if self._deadline_over else self.run.deadline,
            bytes_max=limits.run_bytes_max,
            bytes_each=limits.context_bytes_max,
        )

    def _now(self) -> datetime:
        return self._store.clock.now()

    async def _hold(self, hold: Hold) -> State:
        # Where the run cannot be read there may be a stop in it that cannot, and nothing would come of looking for it.
        stop_known = self._stop is not None or bool(self.run.unreadable)
        await self._store.runs.hold(self.run, hold.state, hold.reason, stop_known=stop_known)
        self.held_because = hold.reason
        return hold.state

    async def _park(self, wait: timedelta) -> State:
        await self._store.runs.park(self.run, wait=max(wait, timedelta(0)), stop_known=self._stop is not None)
        return Parked

    async def _wait(self, until: datetime) -> State | None:
        """Wait here for a short while, or park the run."""
        wait = until - self._now()
        if wait > self._shared.park_after or self._draining:
            return await self._park(wait)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait.total_seconds()):
                await self._nudge.wait()
        return None

    # ---------------------------------------------------------------- performing

    async def _perform(self, action: Perform) -> None:
        """Execute application code and journal its outcome."""
        if action.activity is Activity.STEP and action.step.transactional:
            outcome = await self._in_transaction(action)
        else:
            outcome = await self._call(action)
        if isinstance(outcome, _Returned):
            outcome = await self._returned(action, outcome.value)
        if outcome is None:
            return
        if isinstance(outcome, _Interrupted):
            self.lease.check()  # a lost lease interrupts too, and then nothing more is written
            if self._news:
                await self._learn()
            if action.activity is Activity.STEP and not action.step.transactional:
                await self._append(Kind.INTERRUPTED, step=action.step.name, try_number=action.try_number)
            return
        await self._raised(action, outcome)

    async def _in_transaction(self, action: Perform) -> _Returned | _Raised | _Interrupted | None:
        """A transactional step: its writes and its entry commit together. None: they did, and nothing is left to do."""
        outcome: _Returned | _Raised | _Interrupted | None = None

        async def body(session: Any) -> Entry | None:
            nonlocal outcome
            outcome = await self._call(action, session)
            if not isinstance(outcome, _Returned):
                return None
            result = self._journalable(action, outcome.value)
            if isinstance(result, _Raised):
                outcome = result
                return None
            return self._announce(self._entry(Kind.STEP_SUCCEEDED, action, payload=result[0]))[0]

        entry = await self._store.commit_together(body)
        if entry is not None:
            # What the journal has, which after a lost reply may be an earlier execution's.
            await self._take(entry)
            return None
        if isinstance(outcome, _Raised):  # rolled back with the transaction, so nothing of it happened
            return replace(outcome, failure=replace(outcome.failure, in_doubt=False))
        return outcome

    async def _call(self, action: Perform, session: Any = None) -> _Returned | _Raised | _Interrupted:
        """Run the function within its timeout."""
        to_be_stopped = self._news and not self._gate_passed
        if not self.lease.holds or ((self._hurried or to_be_stopped) and not _spared(action)):
            return _Interrupted()
        part = action.part
        step, context = self._step(action, session), self._hand_out_context()
        self._broken_off = False
        scope = asyncio.timeout(None)
        timers: list[Callable[[], object]] = []
        error: BaseException
        try:
            async with scope:
                self._scope, self._in_hand = scope, action
                try:
                    timers += self._watch_deadline()
                    if part.in_thread:
                        await self._wait_for_thread(action)
                    timers += self._limit(part, scope)
                    value = await self._begun(part, context, step)
                finally:
                    # From here on there is nothing to break off: a scope that was left cannot be told to end any more.
                    self._scope = self._in_hand = self._overstays_at = None
                    for end in timers:
                        end()
            if not isinstance(value, _Threw):
                await self._shake_off_cancellation()
                return _returned(value)
            error = value.error
        except asyncio.CancelledError:
            if not self._cancelled_from_within():
                raise
            error = TimeoutError("the step was cancelled from within")
        except (Exception, SystemExit) as raised:
            if session is not None and is_aborted_transaction(raised):
                await self._shake_off_cancellation()
                raise  # the transaction's own fault: nothing of it happened, and the whole of it is tried again
            error = raised
        await self._shake_off_cancellation()
        return self._failed_try(part, error, timed_out=scope.expired())

    def _hand_out_context(self) -> BaseModel:
        context, self._context = self._context, None
        return context if context is not None else load_context(self._saga.context, self._payload, "the context")

    async def _wait_for_thread(self, action: Perform) -> None:
        free = self._shared.free_threads
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONG_WAIT_S):
                await free.acquire()
                return
        what = "a plain function waits for a thread; all of them are busy or stuck"
        self._log().warning(what, step=action.step.name, seconds=_LONG_WAIT_S)
        await free.acquire()

    def _limit(self, part: Part, scope: asyncio.Timeout) -> Sequence[Callable[[], object]]:
        """The try begins now: so does its timeout, unless it is being broken off already. Returns what ends it."""
        if part.timeout is None or self._broken_off:
            return ()
        seconds = part.timeout.total_seconds()
        self._overstays_at = self._shared.monotonic() + seconds
        return (self._shared.timeouts.begin(scope, seconds),)

    async def _shake_off_cancellation(self) -> None:
        """A step may have cancelled its own task and ended: that must not tear the write of its outcome."""
        if self._task is not None and self._task.cancelling():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            self._cancelled_from_within()

    def _cancelled_from_within(self) -> bool:
        """Whether a cancellation that arrives here is the step's own doing, or a library's below it; it is undone then.

        Nobody cancels attempts from outside, except who shuts the loop down around what was left behind.
        """
        if self._task is None or not self.lease.holds:
            return False
        while self._task.cancelling():
            self._task.uncancel()
        return True

    def _failed_try(self, part: Part, error: BaseException, *, timed_out: bool) -> _Raised | _Interrupted:
        if self._broken_off:
            return _Interrupted()
        if timed_out and isinstance(error, TimeoutError):
            assert part.timeout is not None
            error = TimeoutError(f"no outcome within {part.timeout.total_seconds():g} s")
        return _Raised(error, part.retry.failure(error))

    def _begun(self, part: Part, context: BaseModel, step: Step[Any]) -> Awaitable[object]:
        """The function's own awaitable, or one on the thread that runs it."""
        return self._in_thread(part, context, step) if part.in_thread else part.function(context, step)

    async def _in_thread(self, part: Part, context: BaseModel, step: Step[Any]) -> object:
        """What the function returns, or _Threw."""
        inherited = contextvars.copy_context()

        def run() -> object:
            try:
                return inherited.run(part.function, context, step)
            except (asyncio.CancelledError, CancelledError):
                return _Threw(TimeoutError("the step was cancelled from within"))
            except BaseException as error:  # some, StopIteration for one, cannot be passed on by a future
                return _Threw(error)

        shared, loop = self._shared, asyncio.get_running_loop()
        call = shared.threads.submit(run)
        shared.thread_calls.add(call)

        def ended(call: Future[Any]) -> None:
            shared.thread_calls.discard(call)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the worker is gone, and this was left behind
                loop.call_soon_threadsafe(shared.free_threads.release)

        call.add_done_callback(ended)
        try:
            value = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            call.add_done_callback(_put_away)  # it goes on in its thread, and nobody takes what it returns
            raise
        # A wrapper of an async function (a tracer, a lambda) passes for a plain one; what it was to do begins only now.
        return await value if inspect.isawaitable(value) else value

    def _watch_deadline(self) -> Sequence[Callable[[], object]]:
        """A deadline that comes while a step is in hand is like a stop: the step gets its grace."""
        if self.run.deadline is None or self._gate_passed or self._progress.rollback is not None:
            return ()
        left = (self.run.deadline - self._now()).total_seconds()
        return (asyncio.get_running_loop().call_later(max(0.0, left), self._turn_back_soon).cancel,)

    def _step(self, action: Perform, session: Any) -> Step[Any]:
        run, name = self.run, action.step.name
        key = step_key(run.run_id, name)
        undoes = action.activity is Activity.COMPENSATION
        return Step(
            run_id=run.run_id,
            saga=run.saga,
            name=name,
            attempt=self._claim.attempt,
            try_number=action.try_number,
            idempotency_key=compensation_key(run.run_id, name) if undoes else key,
            tenant=run.tenant,
            resources=self._shared.resources,
            fate=action.fate,
            step_key=key,
            # Compensations know nothing of stops: one that shares code with its step must not finish early.
            stop_asked=StopAsked() if undoes else self._stop_asked,
            session=session,
        )

    # ---------------------------------------------------------------- journaling

    async def _returned(self, action: Perform, value: object) -> _Raised | None:
        """Journal a value that was returned; or say why it cannot be, which is then the step's definite failure."""
        if action.activity is Activity.COMPENSATION:
            await self._append(Kind.COMPENSATION_SUCCEEDED, action)
            return None
        kind = Kind.STEP_SUCCEEDED if action.activity is Activity.STEP else Kind.PROBE_SUCCEEDED
        if action.activity is Activity.PROBE and value is None:
            await self._append(kind, action)
            return None
        result = self._journalable(action, value)
        if isinstance(result, _Raised):
            return result
        payload, context = result
        await self._append(kind, action, payload=payload)
        self._payload, self._context = payload, context
        return None

    def _journalable(self, action: Perform, value: object) -> tuple[bytes, BaseModel] | _Raised:
        limits = self._shared.limits
        try:
            payload, context = dump_context(self._saga.context, value)
            size_bytes = len(payload) + self._sealer.overhead_bytes
            _fits("its context", size_bytes, limits.context_bytes_max)
            if action.step.kind in (StepKind.COMPENSATED, StepKind.UNCOMPENSATED):
                # From the pivot on there is room: the gate saw to that.
                _fits("the run's contexts together", self._progress.payload_bytes + size_bytes, limits.run_bytes_max)
        except NotJournalable as error:
            return _unusable(error)
        return payload, context

    async def _raised(self, action: Perform, outcome: _Raised) -> None:
        verdict = after_failure(self._progress, action, outcome.failure, self._now(), action.part.retry.wait)
        due_at = _milliseconds(verdict.due_at) if verdict.due_at is not None else None
        await self._fail(verdict.kind, outcome.error, action, due_at=due_at, in_doubt=verdict.in_doubt)

    async def _fail(self, kind: Kind, error: BaseException, action: Perform | None = None, **more: Any) -> None:
        """Journal a failure, and log it: what kind of exception it is, never what it says, which may be a payload."""
        entry = await self._append(kind, action, payload=dump_error(error), **more)
        self._log().info(
            "try failed",
            step=entry.step,
            kind=str(kind),
            try_=entry.try_number,
            error=type_name(error),
            in_doubt=entry.in_doubt,
            next_try_at=entry.due_at.isoformat() if entry.due_at is not None else None,
        )

    def _log(self) -> EngineLog:
        run = self.run
        log = engine_log("sagas.worker")
        return log.bind(worker=self._claim.worker, run=run.run_id, saga=run.saga, attempt=run.attempts)

    def _entry(self, kind: Kind, action: Perform | None = None, payload: bytes | None = None, **more: Any) -> Entry:
        if action is not None:
            more["step"], more["try_number"] = action.step.name, action.try_number
        seq, claim = self._progress.seq + 1, self._claim
        if payload is not None:
            more["payload"] = self._sealer.seal(*place_of_payload(kind, seq), payload)
        at = _milliseconds(self._now())
        return Entry(self.run.run_id, seq, kind, at, claim.attempt, claim.worker, claim.token, **more)

    def _announce(self, entry: Entry) -> tuple[Entry, Progress, Action | None]:
        """The entry with what begins next, the intent that costs no write of its own; what will be known then."""
        progress = self._progress.after(entry)
        if entry.kind is Kind.INTERRUPTED and self._draining:
            return entry, progress, None  # nothing begins: the run is handed back
        action = next_action(self._saga, progress, self._facts, entry.at)
        what = intent(action)
        return entry._replace(next=what), progress.announced(what), once_announced(action, self._facts)

    async def _append(self, kind: Kind, action: Perform | None = None, **more: Any) -> Entry:
        entry, progress, planned = self._announce(self._entry(kind, action, **more))
        await self._store.journal.append(entry)
        self._progress, self._planned = progress, planned
        return entry

    async def _take(self, entry: Entry) -> None:
        """Go on from an entry that a transaction has committed."""
        self._progress = self._progress.after(entry)
        stored = entry.payload or b""
        try:
            payload = self._open_context(entry.seq, stored)
        except KeyUnavailable:  # read back after a lost reply, and sealed anew since, with a key that came after ours
            opener = await self._shared.keys.opener(self.run.tenant, self.run.run_id, [stored])
            payload = opener.open(*place_of_newest_context(entry.seq), stored)
        self._payload, self._context = payload, None


def _spared(action: Perform) -> bool:
    """Whether a drain leaves it to finish: a compensation is never torn, and the pivot is never interrupted."""
    return action.activity is Activity.COMPENSATION or (
        action.activity is Activity.STEP and action.step.kind is StepKind.PIVOT
    )


def _returned(value: object) -> _Returned | _Raised:
    """What a function came to that returned this. What it only promises, nobody has done: that is never success."""
    if isinstance(value, BaseModel) or not _is_promise(value):
        return _Returned(value)
    _close(value)
    return _unusable(
        NotJournalable(
            f"it returned a {type(value).__name__} that nobody awaited, so what that was to do is not done; "
            "await it, and return what comes of it"
        )
    )


def _unusable(error: NotJournalable) -> _Raised:
    # Pointless to repeat, but the function did return: what it was to do has probably happened.
    return _Raised(error, Failure(retryable=False, in_doubt=True))


def _is_promise(value: object) -> bool:
    return (
        inspect.isawaitable(value)
        or inspect.isgenerator(value)
        or inspect.isasyncgen(value)
        or isinstance(value, Future)
    )


def _close(value: object) -> None:
    """Say that a coroutine is not forgotten but left out on purpose; Python warns of it otherwise."""
    if inspect.iscoroutine(value):
        value.close()


def _put_away(call: Future[Any]) -> None:
    if not call.cancelled():
        _close(call.result())


def _fits(what: str, size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise NotJournalable(f"{what} would be {over_limit(size_bytes, limit_bytes)}")


def _milliseconds(at: datetime) -> datetime:
    """As the database keeps it, so that a decision made now and one made from the journal see the same time."""
    return at.replace(microsecond=at.microsecond // 1000 * 1000)
