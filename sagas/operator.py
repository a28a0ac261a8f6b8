"""The operator's verbs: move on what is held, cut a wait short, start again what was undone.

Each names who and why, and journals it in the transaction that acts; a restart keeps it with the new run. Each looks at
where the run stands, and refuses with the reason what would repeat an effect that was undone or cannot be undone. Of
two who act at once, one is told that the other was quicker.

Longer than other modules: many short verbs, and beside each what it refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeVar

from pydantic import BaseModel

from sagas.choosing import (
    StatesGiven,
    check_context,
    check_limit,
    check_run_ids,
    check_saga,
    choose_runs,
    choose_states,
    pages,
    read_run,
)
from sagas.clock import new_token
from sagas.definition import Saga, StepKind, is_plain
from sagas.errors import InvalidInput, NoKeyring, OperatorRefused, RunNotFound, SagaError
from sagas.identity import restart_id_of
from sagas.keykeeping import KeyKeeper
from sagas.keyring import ClaimRound, keys_of, sealer_of
from sagas.limits import Limits
from sagas.payload import dump_text
from sagas.sealing import Slot, place_of_newest_context, place_of_payload, place_of_reason
from sagas.stopping import NOTHING_TO_UNDO
from sagas.tenancy import Reach, store_of
from sagas.texts import check_words
from sagas_store import MongoStore
from sagas_store.entries import Entry, Kind
from sagas_store.errors import RunExists, WrongState
from sagas_store.inputs import check_flag, given_or
from sagas_store.records import HeldGroup, NewRun, RunFilter, RunRecord
from sagas_store.states import HELD, SETTLED, State
from sagas_store.tenants import TenantDatabases

__all__ = ["BulkResult", "Operator"]

C = TypeVar("C", bound=BaseModel)

_BULK_MAX: Final = 100_000
_AT_ONCE: Final = 16

_RESUMABLE: Final = frozenset({State.FORWARD_INCOMPLETE, State.COMPENSATION_FAILED, State.BROKEN, State.FAILED})
_TWICE: Final = "a new run would do everything again; start one under its own key if you mean it"
_RESTARTABLE: Final = frozenset({State.COMPENSATED, State.CANCELLED, State.TIMED_OUT})


@dataclass(slots=True)
class BulkResult:
    """What a bulk verb did, or with a dry run would do."""

    dry_run: bool
    done: list[str] = field(default_factory=list)
    """Ids of the runs that were moved on (dry run: that would be tried)."""
    refused: dict[str, str] = field(default_factory=dict)
    """Run id -> why not."""


class Operator:
    """Every verb takes `by` (who) and `reason` (why); both are kept, with what they changed."""

    def __init__(
        self, store: MongoStore | TenantDatabases, *, tenant: str | None = None, limits: Limits | None = None
    ) -> None:
        """With a `tenant` it is bound, and reaches that tenant's runs alone. `limits` should be the workers'."""
        self._reach = Reach(tenant)
        self._store = store_of(store, tenant, "Operator")
        self._keys = keys_of(self._store)
        self._limits = given_or("limits", limits, Limits)
        self.keys: Final = KeyKeeper(self._store, tenant=tenant)
        """The tenants' keys: rotate, seal anew, ask who needs one, destroy."""

    async def resume(self, run_id: str, *, by: str, reason: str) -> None:
        """Let a held run go on from its journal: spent tries begin anew, nothing that is done or undone is repeated.

        For `forward_incomplete` (the step after the pivot is tried again), `compensation_failed` (only the unfinished
        compensations run), `broken` (after a fix), and `failed` (the step of a plain durable function is tried again).
        Raises OperatorRefused with the reason, RunNotFound, UnreadableRun, InvalidInput.
        """
        check_words(by, reason)
        run = await self._read(run_id)
        if run.state is State.IN_DOUBT:
            raise OperatorRefused(
                run_id, run.state, "nobody knows whether its pivot happened; find out, and say so: verdict"
            )
        if run.state is State.QUARANTINED:
            raise OperatorRefused(
                run_id,
                run.state,
                "its payload does not open; once its key is back, requeue it: sagas requeue",
            )
        if run.state not in _RESUMABLE:
            raise OperatorRefused(run_id, run.state, _not_held(run))
        await self._move_on(run, Kind.RESUMED, by, reason)

    async def verdict(
        self,
        saga: Saga[C],
        run_id: str,
        *,
        happened: bool,
        context: C | None = None,
        by: str,
        reason: str,
        dry_run: bool = False,
    ) -> None:
        """Say whether the pivot of an `in_doubt` run happened. It cannot be taken back.

        Happened: `context` is what the pivot would have returned, and the run goes forward from it; begin with the one
        before the pivot, `Client.context`. Not happened: everything is undone. A dry run looks whether it applies, and
        changes nothing. Raises OperatorRefused, RunNotFound, UnreadableRun, InvalidInput.
        """
        check_saga(saga)
        check_words(by, reason)
        check_flag("happened", happened)
        check_flag("dry_run", dry_run)
        if happened != (context is not None):
            raise InvalidInput("context", "give the pivot's context if it happened, and none if it did not")
        payload: bytes | None = None
        if context is not None:
            payload = check_context(saga, context, self._limits, sealed=self._store.keyring is not None)
        run = await self._read(run_id)
        if run.state is not State.IN_DOUBT:
            raise OperatorRefused(run_id, run.state, "a verdict is for runs whose pivot is in doubt")
        if (run.saga, run.fingerprint) != (saga.name, saga.fingerprint):
            raise InvalidInput(
                "saga", f"run {run_id} is of {run.saga} [{run.fingerprint}], not of {saga.name} [{saga.fingerprint}]"
            )
        if dry_run:
            return
        pivot = next(step.name for step in saga.steps if step.kind is StepKind.PIVOT)  # nothing else is held in doubt
        await self._move_on(run, Kind.VERDICT, by, reason, step=pivot, payload=payload)

    async def retry_now(self, run_id: str, *, by: str, reason: str) -> None:
        """Cut the wait of a parked run short: it is due now. Raises as `resume` does."""
        check_words(by, reason)
        run = await self._read(run_id)
        if run.state is not State.PENDING:
            why = "it is under way already" if run.state is State.RUNNING else "it is not waiting for a retry"
            raise OperatorRefused(run_id, run.state, why)
        if run.attempts == 0 and run.blocked is None:
            raise OperatorRefused(
                run_id, run.state, "it has not begun yet, so there is no wait for a retry to cut short"
            )
        self._refuse_due(run)
        await self._move_on(run, Kind.RETRIED_NOW, by, reason)

    async def restart_as_new(self, run_id: str, *, by: str, reason: str) -> str:
        """Start a new run with the input of one that was undone, and return its id; the new one names the old.

        Once: asked again it returns the same new run (restart that one if it was undone too). Refused for runs that
        completed or that still owe work, and for plain durable functions that had begun, because it would repeat their
        effects. Where the old one had a deadline the new one has as long from its own start as the old one had. Raises
        as `resume` does, and CannotOpen.
        """
        check_words(by, reason)
        run = await self._read(run_id, with_input=True)
        if run.state not in _RESTARTABLE:
            raise OperatorRefused(run_id, run.state, _not_undone(run))
        if _has_left_effects(run):
            raise OperatorRefused(run_id, run.state, f"it had begun, and {NOTHING_TO_UNDO}: {_TWICE}")
        now = self._store.clock.now()
        new_id = restart_id_of(run_id)
        sealer = await self._keys.sealer(run.tenant, new_id)
        before = await self._keys.opener(run.tenant, run_id, [run.input])
        payload = before.open(Slot.INPUT, 0, run.input)
        with contextlib.suppress(RunExists):  # restarted before
            await self._store.runs.insert(
                NewRun(
                    run_id=new_id,
                    saga=run.saga,
                    version=run.version,
                    fingerprint=run.fingerprint,
                    input=sealer.seal(Slot.INPUT, 0, payload),
                    tenant=run.tenant,
                    keys=(sealer.key_id,) if sealer.key_id is not None else (),
                    created_at=now,
                    due_at=now,
                    deadline=_deadline_anew(run, now),
                    restarted_from=run_id,
                    started_by=by,
                    started_reason=sealer.seal(Slot.RESTART, 0, dump_text(reason)),
                )
            )
        return new_id

    # ---------------------------------------------------------------- quarantine

    async def list_held(self, *, status: StatesGiven = HELD, tenant: str | None = None) -> list[HeldGroup]:
        """How many runs are held, by state, tenant, and, where payloads do not open, key and kind of failure.

        Opens no payload. The runs themselves: `Client.runs(state=..., tenant=...)`.
        """
        states, tenant = choose_states("status", status, HELD), self._reach.choose(tenant)
        await self._store.ready()
        return await self._store.runs.groups(RunFilter(states=states, tenant=tenant))

    async def list_blocked(self, *, tenant: str | None = None) -> list[HeldGroup]:
        """How many runs wait, and are not held, because their payloads do not open: grouped as `list_held` does.

        They go on by themselves once they open, or are quarantined in the end.
        """
        tenant = self._reach.choose(tenant)
        await self._store.ready()
        waiting = RunFilter(states=frozenset({State.PENDING}), tenant=tenant, blocked=True)
        return await self._store.runs.groups(waiting)

    async def requeue_quarantined(
        self,
        *,
        by: str,
        reason: str,
        tenant: str | None = None,
        runs: Iterable[str] | None = None,
        limit: int = _BULK_MAX,
        dry_run: bool = False,
    ) -> BulkResult:
        """Let quarantined runs go on, once their key is back: those of a tenant, or these. Each keeps its place.

        Runs that are still on hold because their payloads do not open are made due, too. They are let go oldest first,
        in the order in which they were started (named `runs`: in the order given), sixteen at once, so within those
        sixteen a live worker may see a later one sooner; with a `limit` the oldest are taken. Before a run is changed
        its key is asked for and its newest context opened: what does not open stays where it is, and `refused` says
        why. A dry run does just that. A tenant and runs together mean those of the runs that are the tenant's; others
        are not found. To name neither is refused when any of them has a tenant.
        """
        check_words(by, reason)
        check_limit(limit)
        check_flag("dry_run", dry_run)
        named = check_run_ids("runs", runs) if runs is not None else None
        tenant = self._reach.choose(tenant)
        await self._store.ready()
        chosen = await self._blocked(tenant, limit) if named is None else named[:limit]
        result = BulkResult(dry_run)
        together = ClaimRound()

        async def requeue(run_id: str) -> None:
            try:
                run = await self._read(run_id)
                if tenant is not None and run.tenant != tenant:
                    raise RunNotFound(run_id)
                await self._opens(run, together)
                if not dry_run:
                    await self._move_on(run, Kind.REQUEUED, by, reason)
            except SagaError as failed:
                result.refused[run_id] = _why(failed)
            else:
                result.done.append(run_id)

        for begin in range(0, len(chosen), _AT_ONCE):
            # All of these before any later one, or a worker would see that one first.
            await asyncio.gather(*map(requeue, chosen[begin : begin + _AT_ONCE]))
        return result

    async def _blocked(self, tenant: str | None, limit: int) -> list[str]:
        """Ids of runs that are held, or wait, because they do not open. Raises InvalidInput for tenants not named."""
        if tenant is None and await self._store.blocked_runs.any_tenanted():
            raise InvalidInput("tenant, runs", "name one of them: some of the runs that do not open are of a tenant")
        return await self._store.blocked_runs.oldest(tenant, limit=limit)

    async def _opens(self, run: RunRecord, together: ClaimRound) -> None:
        """Raise unless the run is blocked, and could go on: its newest context opens, the next one could be sealed."""
        if run.state is not State.QUARANTINED and not (run.state is State.PENDING and run.blocked is not None):
            raise OperatorRefused(run.run_id, run.state, "it is not held because of its key")
        self._refuse_due(run)
        newest = await self._store.journal.last_context(run.run_id)
        seq, stored = newest or (None, (await self._read(run.run_id, with_input=True)).input)
        sealer = await sealer_of(self._keys, run, stored, claim_round=together)
        sealer.open(*place_of_newest_context(seq), stored)

    # ---------------------------------------------------------------- in bulk

    async def resume_many(
        self,
        *,
        by: str,
        reason: str,
        states: StatesGiven = (State.FORWARD_INCOMPLETE, State.COMPENSATION_FAILED, State.BROKEN),
        tenant: str | None = None,
        saga: str | None = None,
        key_prefix: str | None = None,
        started_before: datetime | None = None,
        limit: int = _BULK_MAX,
        dry_run: bool = False,
    ) -> BulkResult:
        """`resume` for every held run that fits, fifty at once; one that is refused stops none of the others."""
        chosen = choose_runs(
            self._store,
            self._reach,
            choose_states("states", states, _RESUMABLE),
            tenant=tenant,
            saga=saga,
            key_prefix=key_prefix,
            started_before=started_before,
        )
        return await self._each(chosen, self.resume, by=by, reason=reason, limit=limit, dry_run=dry_run)

    async def retry_now_many(
        self,
        *,
        by: str,
        reason: str,
        tenant: str | None = None,
        saga: str | None = None,
        key_prefix: str | None = None,
        started_before: datetime | None = None,
        limit: int = _BULK_MAX,
        dry_run: bool = False,
    ) -> BulkResult:
        """`retry_now` for every parked run that fits; what has not begun, or is due already, is none of them."""
        chosen = choose_runs(
            self._store,
            self._reach,
            frozenset({State.PENDING}),
            tenant=tenant,
            saga=saga,
            key_prefix=key_prefix,
            started_before=started_before,
            waiting=True,
        )
        return await self._each(chosen, self.retry_now, by=by, reason=reason, limit=limit, dry_run=dry_run)

    async def restart_many(
        self,
        *,
        by: str,
        reason: str,
        states: StatesGiven = _RESTARTABLE,
        tenant: str | None = None,
        saga: str | None = None,
        key_prefix: str | None = None,
        started_before: datetime | None = None,
        limit: int = _BULK_MAX,
        dry_run: bool = False,
    ) -> BulkResult:
        """`restart_as_new` for every undone run that fits.

        Those restarted before fit as well: they are not started again, and count as done, in a dry run too.
        """
        chosen = choose_runs(
            self._store,
            self._reach,
            choose_states("states", states, _RESTARTABLE),
            tenant=tenant,
            saga=saga,
            key_prefix=key_prefix,
            started_before=started_before,
        )
        return await self._each(chosen, self.restart_as_new, by=by, reason=reason, limit=limit, dry_run=dry_run)

    async def _each(
        self,
        chosen: RunFilter,
        verb: Callable[..., Awaitable[object]],
        *,
        by: str,
        reason: str,
        limit: int,
        dry_run: bool,
    ) -> BulkResult:
        check_words(by, reason)
        check_limit(limit)
        check_flag("dry_run", dry_run)
        await self._store.ready()
        result = BulkResult(dry_run)

        async def act(run_id: str) -> str | None:
            """Why it was refused, if it was."""
            try:
                await verb(run_id, by=by, reason=reason)
            except SagaError as failed:  # the account of what was done is worth more than the exception
                return _why(failed)
            return None

        async for page in pages(self._store, chosen, limit=limit):
            refusals = [None] * len(page) if dry_run else await asyncio.gather(*map(act, page))
            for run_id, why in zip(page, refusals, strict=True):
                if why is None:
                    result.done.append(run_id)
                else:
                    result.refused[run_id] = why
        return result

    # ---------------------------------------------------------------- shared

    async def _read(self, run_id: str, *, with_input: bool = False) -> RunRecord:
        return await read_run(self._store, self._reach, run_id, with_input=with_input)

    def _refuse_due(self, run: RunRecord) -> None:
        if run.due_at is not None and run.due_at <= self._store.clock.now():
            raise OperatorRefused(run.run_id, run.state, "it is due already: the next free worker takes it")

    async def _move_on(
        self, run: RunRecord, kind: Kind, by: str, reason: str, *, step: str | None = None, payload: bytes | None = None
    ) -> None:
        sealer = await self._keys.sealer(run.tenant, run.run_id)
        if sealer.key_id is None and run.keys:
            raise NoKeyring(run.tenant, None, f"run {run.run_id} is sealed, and nothing of it may lie in the clear")
        at, token = self._store.clock.now(), new_token()

        def entry(seq: int) -> Entry:
            return Entry(
                run_id=run.run_id,
                seq=seq,
                kind=kind,
                at=at,
                attempt=max(1, run.attempts),
                worker="operator",
                token=token,
                step=step,
                by=by,
                reason=sealer.seal(*place_of_reason(kind, seq), dump_text(reason)),
                payload=sealer.seal(*place_of_payload(kind, seq), payload) if payload is not None else None,
            )

        try:
            await self._store.interventions.move_on(run, entry, key_id=sealer.key_id, in_place=kind is Kind.REQUEUED)
        except WrongState as moved:
            raise OperatorRefused(
                run.run_id, State(moved.state), "somebody else was quicker; look at it again"
            ) from moved


def _deadline_anew(run: RunRecord, now: datetime) -> datetime | None:
    if run.deadline is None or run.deadline <= run.created_at:  # over before it was started: no time to carry over
        return None
    try:
        return now + (run.deadline - run.created_at)
    except OverflowError:  # it was at the end of all time, and there it stays
        return run.deadline


def _why(failed: SagaError) -> str:
    """Beside the run's id, which an OperatorRefused names as well."""
    return failed.why if isinstance(failed, OperatorRefused) else str(failed)


def _has_left_effects(run: RunRecord) -> bool:
    """Whether it may have: it had begun, and nothing of it could be undone."""
    return is_plain(run.fingerprint) and run.attempts > 0


def _not_held(run: RunRecord) -> str:
    if run.state in _RESTARTABLE and not _has_left_effects(run):
        return "it was undone, and can only be started anew: restart_as_new, sagas restart"
    if run.state in SETTLED:
        return "it has ended; nothing of it is left to do"
    return "it is not held; a worker moves it on"


def _not_undone(run: RunRecord) -> str:
    if run.state is State.COMPLETED:
        return f"it completed: {_TWICE}"
    if run.state is State.FAILED:
        return "nothing of it was undone: a new run would repeat its effects; resume it"
    if run.state in HELD:
        return "it still owes work; move it on first"
    return "it has not ended yet"
