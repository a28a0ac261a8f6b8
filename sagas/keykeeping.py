"""A tenant's keys in the hands of an operator: make, rotate, seal anew, ask who needs one, destroy.

How a data key comes to its end:

    active    --rotate-->   retired   --rewrap, until nothing needs it-->   --discard-->   destroyed

`rotate` makes a new key for whatever is sealed from now on. `rewrap` seals anew, with the newest key, what older ones
have sealed: run by run, while workers go on. It may be broken off anywhere and begun again: each of its writes replaces
exactly the bytes that it has read, and finds its own work done. `usage` says which runs still need a key, and `discard`
destroys one that none does. `destroy` is another thing: it makes a tenant's payloads unreadable, all of them, for good.

What makes the answer of `usage` certain is `keys` on each run, which names every key that any of its payloads is sealed
with. It may name one too many, never one too few. Rewrapping takes a key away from there when

- everything of the run has been read, and nothing is sealed with that key any more;
- no worker drives the run: its attempt would go on sealing with the key that was newest when it began;
- no attempt before can still write: a later one has an entry in the journal, which fences it off;
- and in the transaction that takes it away the run and its journal still stand as they were read.

Else the run is left over, with the reason, and a later pass gets it.

Longer than other modules: `usage` and `discard` can be trusted because of how `rewrap` takes keys away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from sagas.choosing import StatesGiven, check_limit, choose_states
from sagas.errors import CannotOpen, InvalidInput, KeyLost, KeyRefused
from sagas.keyring import DEFAULT_MAX_AGE, Keyring, Rewrapped, keys_of
from sagas.sealing import DataKey, RunSealer, Slot, keys_needed, place_of_payload, place_of_reason
from sagas.tenancy import Reach, store_of
from sagas.texts import check_text, check_words
from sagas_store import MongoStore
from sagas_store.entries import Entry, Kind
from sagas_store.errors import UnreadableRun, unreadable
from sagas_store.inputs import kind_of
from sagas_store.journal import Resealed
from sagas_store.keys import KeyRecord, KeyState, Purpose
from sagas_store.numbers import check_count
from sagas_store.records import RunRecord
from sagas_store.resealing import ResealedField
from sagas_store.states import HELD, OPEN, SETTLED, State
from sagas_store.tenants import TenantDatabases

__all__ = ["NO_TENANT", "KeyKeeper", "KeyUsage", "NeedingRun", "Rewrap"]

_PAGE: Final = 100
_AT_ONCE: Final = 8
_ROUNDS: Final = 16
"""How often one run is read again because it has changed; then a later pass is due."""
_UNDER_WAY: Final = timedelta(minutes=2)
"""How long a write that was sealed before a rotation was noticed may take to arrive: the store's patience, and more."""
NO_TENANT: Final = "no tenant"
"""What confirms the destruction of the keys of runs without a tenant."""


@dataclass(slots=True)
class Rewrap:
    """What a rewrap has done so far, or in the end."""

    tenant: str | None
    key_id: str
    """The newest key, which seals everything anew."""
    older: tuple[str, ...] = ()
    """The retired keys that it goes through."""
    total: int = 0
    """How many runs needed one of those when it began; one that needs two counts twice."""
    seen: int = 0
    """How many of them have been looked at."""
    done: int = 0
    """How many of them need no older key any more."""
    payloads: int = 0
    """How many payloads were sealed anew."""
    left: dict[str, str] = field(default_factory=dict)
    """Run id -> why it still needs an older key. Run it again later."""
    lost: dict[str, str] = field(default_factory=dict)
    """Key id -> why that key could not be had; what it has sealed was not touched."""

    @property
    def complete(self) -> bool:
        """Whether no run needs an older key any more, as far as was seen."""
        return not self.left and not self.lost


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """A key, who needs it, and whether it may be destroyed."""

    key: KeyRecord
    runs: dict[State, int]
    """How many runs need it, by state. Each that does is counted; one may be that no longer does, until a rewrap."""
    discardable: bool
    """Whether `discard` would destroy it now."""
    why: str
    """Why so, and what to do."""

    @property
    def open(self) -> int:
        """How many open runs need it."""
        return self._of(OPEN)

    @property
    def held(self) -> int:
        """How many held runs need it."""
        return self._of(HELD)

    @property
    def settled(self) -> int:
        """How many settled runs need it, for their results, journals and restarts to be read."""
        return self._of(SETTLED)

    def _of(self, group: Iterable[State]) -> int:
        return sum(self.runs.get(state, 0) for state in group)


@dataclass(frozen=True, slots=True)
class NeedingRun:
    """A run that needs a key."""

    run_id: str
    state: State


class KeyKeeper:
    """The keys of one tenant after the other. `Operator(store).keys`; bound, it reaches its own tenant's alone.

    Where a verb takes a tenant, None stands for the runs without one; for a keeper that is bound, for its tenant.
    Looking, and destroying, needs no keyring. What retires or destroys a key names who and why; both stay with the key,
    in the clear, because there may be no key left to seal them with.
    """

    def __init__(self, store: MongoStore | TenantDatabases, *, tenant: str | None = None) -> None:
        """With a `tenant` it is bound."""
        self._reach = Reach(tenant)
        self._store = store_of(store, tenant, "KeyKeeper")
        self._keys = keys_of(self._store)

    # ---------------------------------------------------------------- looking

    async def of_tenant(self, tenant: str | None = None) -> list[KeyRecord]:
        """A tenant's keys, oldest first: purposes, states, times, master keys."""
        tenant = self._reach.choose(tenant)
        await self._store.ready()
        return await self._store.keys.list_of_tenant(tenant)

    async def every(self) -> AsyncIterator[KeyRecord]:
        """All keys that can be reached, of all tenants, in the order of their ids."""
        await self._store.ready()
        if self._reach.tenant is not None:
            for key in await self.of_tenant():
                yield key
            return
        after: str | None = None
        while page := await self._store.keys.page(after=after, limit=_PAGE):
            for key in page:
                yield key
            after = page[-1].key_id

    async def usage(self, tenant: str | None, key_id: str) -> KeyUsage:
        """Which runs still need this key, by state, and whether it may be destroyed. Raises KeyRefused."""
        key = await self._record(tenant, key_id)
        counts = await self._store.runs.count_needing_key(key_id)
        why_not = self._why_not(key) or _needed(sum(counts.values()))
        return KeyUsage(key, counts, why_not is None, why_not or "no run needs it")

    async def runs_needing(
        self,
        tenant: str | None,
        key_id: str,
        *,
        states: StatesGiven | None = None,
        after: str = "",
        limit: int = 100,
    ) -> list[NeedingRun]:
        """A page of the runs that need this key, in the order of their ids; the next one is `after` the last id."""
        chosen = choose_states("states", states) if states is not None else None
        check_text("after", after)
        check_limit(limit)
        await self._record(tenant, key_id)
        found = await self._store.runs.needing_key(key_id, states=chosen, after=after, limit=limit)
        return [NeedingRun(run.run_id, run.state) for run in found]

    # ---------------------------------------------------------------- making

    async def create(self, tenant: str | None = None) -> str:
        """Make a tenant's first keys, or new ones after a destruction; returns the data key's id: Keyring.create."""
        tenant = self._reach.choose(tenant)
        keyring = await self._ready()
        return await keyring.create(tenant)

    async def rotate(self, tenant: str | None = None, *, by: str, reason: str) -> str:
        """Seal with a new data key from now on; returns its id. See Keyring.rotate, and then `rewrap`."""
        check_words(by, reason)
        tenant = self._reach.choose(tenant)
        keyring = await self._ready()
        return await keyring.rotate(tenant, by=by, reason=reason)

    async def rewrap_master(self) -> Rewrapped:
        """Wrap every key of every tenant with the newest master key. See Keyring.rewrap_keys. Refused where bound."""
        if self._reach.tenant is not None:
            raise InvalidInput("tenant", "master keys are everybody's, and this is bound to one tenant")
        keyring = await self._ready()
        return await keyring.rewrap_keys()

    # ---------------------------------------------------------------- destroying

    async def discard(self, tenant: str | None, key_id: str, *, confirm: str, by: str, reason: str) -> None:
        """Destroy one retired key that no run needs any more, for good. `confirm` must repeat its id.

        Raises KeyRefused, with what to do first: while it is active, while a run needs it, and until every process has
        noticed that it was retired. Asked again once it is destroyed, it does nothing.
        """
        check_words(by, reason)
        if confirm != key_id:
            raise InvalidInput("confirm", "must repeat the id of the key that shall be destroyed for good")
        key = await self._record(tenant, key_id)
        if key.state is KeyState.DESTROYED:
            return
        why_not = self._why_not(key)
        # Nothing new comes to need it: whoever seals knows the newer key by now, and attempts that still seal with it
        # belong to runs that name it.
        if why_not is None and await self._store.runs.needing_key(key_id, limit=1):
            why_not = _needed(sum((await self._store.runs.count_needing_key(key_id)).values()) or 1)
        if why_not is None and not await self._store.keys.discard(key_id, by=by, reason=reason):
            why_not = "somebody else was quicker; look at it again"
        if why_not is not None:
            raise KeyRefused(key.tenant, key_id, why_not)
        if isinstance(self._keys, Keyring):
            self._keys.forget(key.tenant)

    async def destroy(self, tenant: str | None = None, *, confirm: str, by: str, reason: str) -> list[str]:
        """Make everything that was ever sealed for this tenant unreadable, for good; returns the ids of its keys.

        `confirm` must repeat the tenant, or be "no tenant". Its runs stay listed. See Keyring.destroy.
        """
        check_words(by, reason)
        tenant = self._reach.choose(tenant)
        if confirm != (tenant if tenant is not None else NO_TENANT):
            raise InvalidInput("confirm", "must repeat the tenant whose payloads shall become unreadable for good")
        await self._store.ready()
        if isinstance(self._keys, Keyring):
            return await self._keys.destroy(tenant, confirm=tenant, by=by, reason=reason)
        return [key.key_id for key in await self._store.keys.destroy(tenant, by=by, reason=reason)]

    # ---------------------------------------------------------------- sealing anew

    async def rewrap(
        self, tenant: str | None = None, *, progress: Callable[[Rewrap], object] | None = None, at_once: int = _AT_ONCE
    ) -> Rewrap:
        """Seal anew with a tenant's newest key whatever older ones have sealed for its runs, and say what is left.

        Workers go on meanwhile. Runs that are running are left over, and so is what changes under its hands; call it
        again later, at best once every process has noticed the rotation (half of the keyring's `max_age`). It may die,
        be cancelled or be called twice at once without harm. `progress` is called with what was done so far, after each
        hundred runs. Raises CannotOpen when the newest key cannot be had, StoreUnavailable: call it again.
        """
        tenant = self._reach.choose(tenant)
        check_count("at_once", at_once)
        if progress is not None and not callable(progress):
            raise InvalidInput("progress", f"must be a function of a Rewrap, not {kind_of(progress)}")
        keyring = await self._ready()
        present = [key for key in await keyring.keys(tenant) if key.purpose is Purpose.DATA]
        newest = next((key.key_id for key in present if key.state is KeyState.ACTIVE), None)
        if newest is None:
            raise KeyLost(tenant, None, "it has no active data key to seal with; make one: sagas keys create")
        current = await keyring.get(tenant, newest)
        report = Rewrap(tenant, newest)
        for key in present:
            if key.state is not KeyState.RETIRED:
                continue
            try:
                await keyring.get(tenant, key.key_id)
            except CannotOpen as lost:
                report.lost[key.key_id] = lost.why
            else:
                report.older += (key.key_id,)
                counts = await self._store.runs.count_needing_key(key.key_id)
                report.total += sum(counts.values())
        for key_id in report.older:
            await self._rewrap_key(_Work(keyring, current, frozenset(report.older)), key_id, report, progress, at_once)
        return report

    async def _rewrap_key(
        self, work: _Work, key_id: str, report: Rewrap, progress: Callable[[Rewrap], object] | None, at_once: int
    ) -> None:
        room, away = asyncio.Semaphore(at_once), asyncio.Event()

        async def one(run_id: str) -> None:
            async with room:
                if away.is_set():
                    return
                try:
                    left = await self._rewrap_run(work, run_id, report)
                except BaseException:
                    away.set()  # the database: nobody else need wait for it in vain
                    raise
            report.seen += 1
            if left is None:
                report.done += 1
            else:
                report.left[run_id] = left

        after = ""
        while page := await self._store.runs.needing_key(key_id, after=after, limit=_PAGE):
            fates = await asyncio.gather(*(one(run.run_id) for run in page), return_exceptions=True)
            if progress is not None:
                progress(report)
            for fate in fates:
                if fate is not None:
                    raise fate
            after = page[-1].run_id

    async def _rewrap_run(self, work: _Work, run_id: str, report: Rewrap) -> str | None:
        """Seal one run anew. Returns why it still needs an older key, or None."""
        for _ in range(_ROUNDS):
            # The run first: what happens to it after this is seen when its keys are taken away.
            try:
                run = await self._store.runs.get(run_id, with_input=True)
            except UnreadableRun as newer:
                return unreadable(newer.fields)
            if run is None or not work.older.intersection(run.keys):
                return None
            if run.state is State.RUNNING:
                return "it is running"
            journal = await self._store.journal.load(run_id)
            held = [*_in_run(run), *_in_journal(journal)]
            stale = [one for one in held if work.older.intersection(keys_needed([one.stored]))]
            if stale:
                try:
                    await self._seal_anew(work, run, stale, report)
                except CannotOpen as error:
                    return f"{type(error).__name__}: {error.why}"
                continue  # and look again: only what was read after the last write counts
            if (why := _may_yet_need(run, journal)) is not None:
                return why
            kept = sorted(keys_needed(one.stored for one in held)) or [work.current.key_id]
            last_seq = journal[-1].seq if journal else 0
            if await self._store.resealing.keep_keys(run, kept, last_seq=last_seq):
                return None
        return "it changes all the time"

    async def _seal_anew(self, work: _Work, run: RunRecord, stale: list[_Stored], report: Rewrap) -> None:
        older = [await work.keyring.get(run.tenant, key_id) for key_id in sorted(keys_needed(x.stored for x in stale))]
        sealer = RunSealer(run.tenant, run.run_id, work.current, older)
        fields: list[ResealedField] = []
        entries: list[Resealed] = []
        broken: CannotOpen | None = None
        for one in stale:
            try:
                anew = sealer.seal(one.slot, one.number, sealer.open(one.slot, one.number, one.stored))
            except CannotOpen as error:  # tampered with; the others are none the worse for it
                broken = error
                continue
            if one.seq is None:
                fields.append(ResealedField(one.name, one.stored, anew))
            else:
                entries.append(Resealed(one.seq, one.name, one.stored, anew))
        replaced = await self._store.resealing.replace(run.run_id, work.current.key_id, fields, entries)
        report.payloads += replaced  # several runs at once count here: nothing awaited in between
        if broken is not None:
            raise broken

    # ---------------------------------------------------------------- shared

    async def _ready(self) -> Keyring:
        if not isinstance(self._keys, Keyring):
            raise InvalidInput("keyring", "this needs the keys: MongoStore(database, keyring=...), or --master-keys")
        await self._store.ready()
        return self._keys

    async def _record(self, tenant: str | None, key_id: str) -> KeyRecord:
        check_text("key_id", key_id)
        tenant = self._reach.choose(tenant)
        await self._store.ready()
        key = await self._store.keys.get(key_id)
        if key is None or key.tenant != tenant:  # another tenant's is as unknown as none
            raise KeyRefused(tenant, key_id, "there is no key of that id")
        return key

    def _why_not(self, key: KeyRecord) -> str | None:
        """Why it may not be destroyed whoever needs it."""
        if key.purpose is Purpose.LOOKUP:
            return "it is the lookup key, which is never rotated: starting again what was started would start it twice"
        if key.state is KeyState.ACTIVE:
            return "it is active: new payloads are sealed with it; rotate first"
        if key.state is KeyState.DESTROYED:
            return "it is destroyed already"
        noticed_at = self._noticed_at(key)
        if noticed_at is not None and self._store.clock.now() < noticed_at:
            return (
                f"other processes may not have noticed yet that it is retired; ask again after "
                f"{noticed_at:%Y-%m-%d %H:%M:%S} UTC"
            )
        return None

    def _noticed_at(self, key: KeyRecord) -> datetime | None:
        """From when on nobody seals with it any more, but attempts that had begun before."""
        max_age = self._keys.max_age if isinstance(self._keys, Keyring) else DEFAULT_MAX_AGE
        return key.retired_at + max_age + _UNDER_WAY if key.retired_at is not None else None


@dataclass(frozen=True, slots=True)
class _Work:
    """What a rewrap works with."""

    keyring: Keyring
    current: DataKey
    older: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A payload where it lies: in the run's document, or in an entry of its journal."""

    seq: int | None
    name: str
    slot: Slot
    number: int
    stored: bytes = field(repr=False)


def _in_run(run: RunRecord) -> list[_Stored]:
    found = [
        ("input", Slot.INPUT, run.input),
        ("sealed_key", Slot.KEY, run.sealed_key),
        ("started_reason", Slot.RESTART, run.started_reason),
        ("stop.reason", Slot.STOP, run.stop.reason if run.stop is not None else None),
    ]
    return [_Stored(None, name, slot, 0, stored) for name, slot, stored in found if stored is not None]


def _in_journal(journal: Iterable[Entry]) -> list[_Stored]:
    found: list[_Stored] = []
    for entry in journal:
        if entry.payload is not None:
            found.append(_Stored(entry.seq, "payload", *place_of_payload(entry.kind, entry.seq), entry.payload))
        if entry.reason is not None:
            found.append(_Stored(entry.seq, "reason", *place_of_reason(entry.kind, entry.seq), entry.reason))
    return found


def _may_yet_need(run: RunRecord, journal: list[Entry]) -> str | None:
    """Why an older key may be needed although nothing that was read is sealed with it."""
    if any(entry.kind is Kind.UNKNOWN for entry in journal):
        return "this version cannot read all entries of its journal"
    # An attempt whose lease lapsed may be frozen, and write when it wakes, as long as its next number is free. Every
    # later attempt that can read the run takes that number first; one that could not has left it free.
    if run.attempts > 1 and all(entry.attempt < run.attempts for entry in journal):
        return "an attempt before may still write; once the run was claimed or moved on again, it cannot"
    return None


def _needed(runs: int) -> str | None:
    if not runs:
        return None
    return f"{runs} run{'s' if runs > 1 else ''} may still need it; seal them anew: rewrap"
