"""The keyring: a tenant's data keys, from the database, unwrapped by a master key, and kept for a bounded time.

    keyring = Keyring(LocalKeyWrapper.from_file("/etc/sagas/master-keys"))
    keyring.bind(store.keys)
    sealer = await keyring.sealer("vinet", run_id, [run.input])

What is authoritative. The database says which keys a tenant has; the wrapper, alone, can open them. This process
remembers what it was told for at most `max_age`: that is how long a destroyed key, or a right that was taken away, may
go on working here, and how long a rotation takes to be noticed. An attempt that is under way keeps the key of its own
run until it ends: not being able to journal an outcome that has happened would do more harm.

How often the key service is asked. Once per key and process, however many ask at once, and again when half of `max_age`
is over. If that fails for a passing reason, or takes its time, the key serves on until all of it is over, so a key
service that is away, or hangs, for less than half of `max_age` is not noticed. A failure is remembered by whom it
concerns: a passing one for `pause` by everybody, so that a throttled service is left alone; a denied or lost key for
one claim round (`ClaimRound`), so that a thousand runs blocked by it cost one call, and so that a key that came back is
seen by the next claim.

The first use of a tenant makes its keys: a lookup key, then a data key. A tenant that ever had keys gets none by
itself, so a destroyed one is not silently given new ones.

Longer than other modules: what is remembered, what is asked and what is made are one protocol, read best in one place.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeVar, cast

from sagas.clock import Monotonic, RandomBytes, monotonic, random_bytes
from sagas.errors import (
    CannotOpen,
    InvalidInput,
    KeyLost,
    KeyUnavailable,
    OpenFailure,
    StoreUnavailable,
    Tampered,
    Unreadable,
)
from sagas.payload import load_text
from sagas.sealing import (
    KEY_BYTES,
    KEY_ID_BYTES,
    DataKey,
    LookupKey,
    Opener,
    RunOpener,
    RunSealer,
    Sealer,
    Slot,
    Unsealed,
    keys_needed,
)
from sagas.texts import check_tenant, check_words
from sagas.wrapping import KeyName, KeyWrapper, Wrapped
from sagas_store import MongoStore
from sagas_store.errors import KeyIdTaken
from sagas_store.inputs import check_flag, check_kind, check_methods
from sagas_store.keys import KeyRecord, Keys, KeyState, NewKey, Purpose
from sagas_store.numbers import NONE, check_duration
from sagas_store.records import RunRecord

__all__ = [
    "DEFAULT_MAX_AGE",
    "WORDS_PATIENCE_S",
    "ClaimRound",
    "Keyring",
    "NoKeys",
    "Opened",
    "Rewrapped",
    "keys_of",
    "opened_text",
    "sealer_of",
]

T = TypeVar("T")
K = TypeVar("K", DataKey, LookupKey)

_KIND: Final[dict[Purpose, type[DataKey | LookupKey]]] = {Purpose.DATA: DataKey, Purpose.LOOKUP: LookupKey}
_PURPOSE: Final = {kind: purpose for purpose, kind in _KIND.items()}
_PAGE: Final = 100
_REFRESH_S: Final = 0.05
"""How long an answer that serves on, but is past half of its age, waits for a new one."""
DEFAULT_MAX_AGE: Final = timedelta(minutes=5)

WORDS_PATIENCE_S: Final = 1.0
"""How long a person who presses Stop, or looks at a run, waits for the key of words that are for reading alone."""


@dataclass(frozen=True, slots=True)
class _Known:
    """An answer, and when (by the monotonic clock) it was certainly true."""

    value: Any
    as_of: float


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why there is no answer. Whoever asked gets an exception of its own: a shared one would collect their frames."""

    error: Callable[[], Exception]
    passing: bool


@dataclass(slots=True)
class ClaimRound:
    """What one claim round has learnt of keys that do not open: they are not asked for again in the same round."""

    failures: dict[Hashable, _Failure] = field(default_factory=dict, repr=False)
    """Kept by the keyring."""


@dataclass(slots=True)
class Rewrapped:
    """What `Keyring.rewrap_keys` did."""

    done: list[str] = field(default_factory=list)
    """Ids of the keys that the newest master key wraps now."""
    failed: dict[str, str] = field(default_factory=dict)
    """Key id -> why it stays as it is."""


class Keyring:
    """The keys of all tenants. One per process and event loop, shared by its clients, operators and workers."""

    def __init__(
        self,
        wrapper: KeyWrapper,
        *,
        max_age: timedelta | float = DEFAULT_MAX_AGE,
        pause: timedelta | float = timedelta(seconds=1),
        call_timeout: timedelta | float = timedelta(seconds=10),
        create_on_first_use: bool = True,
        monotonic: Monotonic = monotonic,
        random_bytes: RandomBytes = random_bytes,
    ) -> None:
        """Nothing is asked yet.

        `max_age` bounds how long a key is used after it was last asked for. `pause` is how long a key service that did
        not answer is left alone, `call_timeout` how long one answer of it is waited for; each is a timedelta, or
        seconds. Without `create_on_first_use` a tenant needs `create` before its first run. Raises InvalidInput.
        """
        check_methods(
            "wrapper", wrapper, ("wrap", "unwrap"), "a KeyWrapper, LocalKeyWrapper.from_file(...) for instance"
        )
        self._wrapper = wrapper
        self.max_age: Final = check_duration("Keyring.max_age", max_age)
        self._max_age_s = self.max_age.total_seconds()
        self._pause_s = check_duration("Keyring.pause", pause, least=NONE).total_seconds()
        self._call_timeout_s = check_duration("Keyring.call_timeout", call_timeout).total_seconds()
        self._create_on_first_use = check_flag("Keyring.create_on_first_use", create_on_first_use)
        self._monotonic = monotonic
        self._random_bytes = random_bytes
        self._store: Keys | None = None
        self._known: dict[Hashable, _Known] = {}
        self._resting: dict[Hashable, tuple[_Failure, float]] = {}
        self._flights: dict[Hashable, asyncio.Task[Any]] = {}
        self._swept_at = monotonic()

    def bind(self, keys: Keys) -> None:
        """Say where the wrapped keys are kept: `store.keys`. A keyring serves one store. Raises InvalidInput."""
        check_kind("keys", keys, Keys, "keyring.bind(store.keys)")
        if self._store is not None and self._store is not keys:
            raise InvalidInput("keyring", "is in use with another store; give each store a keyring of its own")
        self._store = keys

    # ---------------------------------------------------------------- for the engine

    async def sealer(
        self,
        tenant: str | None,
        run_id: str,
        stored: Iterable[bytes | None] = (),
        *,
        claim_round: ClaimRound | None = None,
    ) -> RunSealer:
        """What seals for this run from now on, and opens what is `stored` of it.

        Costs nothing but memory where the keys are at hand. Raises CannotOpen (KeyUnavailable, KeyDenied, KeyLost,
        Tampered), naming the key; StoreUnavailable when the database does not answer.
        """
        # First what opens: where everything of a tenant is destroyed, the error then names the key that this run needs.
        opening = [await self.get(tenant, key_id, claim_round=claim_round) for key_id in sorted(keys_needed(stored))]
        current = await self.current(tenant, claim_round=claim_round)
        older = [key for key in opening if key.key_id != current.key_id]
        return RunSealer(tenant, run_id, current, older, random_bytes=self._random_bytes)

    async def opener(
        self,
        tenant: str | None,
        run_id: str,
        stored: Iterable[bytes | None],
        *,
        claim_round: ClaimRound | None = None,
    ) -> RunOpener:
        """What opens what is `stored` of this run, and seals nothing. Raises as `sealer` does."""
        keys = [await self.get(tenant, key_id, claim_round=claim_round) for key_id in sorted(keys_needed(stored))]
        return RunOpener(tenant, run_id, keys)

    async def lookup_key(self, tenant: str | None) -> LookupKey:
        """The key that turns a tenant's idempotency keys into run ids. Made on first use. Raises as `sealer` does."""
        return await self._newest(LookupKey, tenant, None)

    async def current(self, tenant: str | None, *, claim_round: ClaimRound | None = None) -> DataKey:
        """The key that seals for this tenant. Made on first use. Raises as `sealer` does."""
        return await self._newest(DataKey, tenant, claim_round)

    async def get(self, tenant: str | None, key_id: str, *, claim_round: ClaimRound | None = None) -> DataKey:
        """A data key of this tenant by its id, active or retired. Raises as `sealer` does."""
        return await self._key(DataKey, tenant, key_id, claim_round)

    # ---------------------------------------------------------------- for the operator

    async def keys(self, tenant: str | None) -> list[KeyRecord]:
        """A tenant's keys, oldest first: states, times, master keys. Nothing is unwrapped."""
        check_tenant(tenant)
        return await self._keys.list_of_tenant(tenant)

    async def create(self, tenant: str | None) -> str:
        """Make a tenant's first keys, or new ones for a tenant that was destroyed; returns the data key's id.

        A tenant that has an active key keeps it, so repeating is safe. After a destruction the same idempotency key
        gives another run than before.
        """
        check_tenant(tenant)
        return await self._make(tenant, anew=True)

    async def rotate(self, tenant: str | None, *, by: str, reason: str) -> str:
        """Seal with a new data key from now on; returns its id. What older ones sealed still opens.

        Other processes notice within half of their `max_age`. Raises KeyLost when the tenant has no active key,
        InvalidInput unless `by` and `reason`, which are kept with the key, say who asks and why.
        """
        check_tenant(tenant)
        check_words(by, reason)
        while True:
            active = await self._keys.newest_active(tenant, Purpose.DATA)
            if active is None:
                raise KeyLost(tenant, None, "it has no active data key to rotate; make one: sagas keys create")
            try:
                new = await self._draw(tenant, Purpose.DATA)
                now = await self._keys.rotate(active.key_id, new, by=by, reason=reason)
            except KeyIdTaken:
                continue
            self.forget(tenant)
            if now is not None:
                return now.key_id

    async def destroy(self, tenant: str | None, *, confirm: str | None, by: str, reason: str) -> list[str]:
        """Make everything that was ever sealed for this tenant unreadable, for good; returns the ids of its keys.

        `confirm` must repeat the tenant. Other processes notice within their `max_age`. Backups of the keys collection
        hold the wrapped keys as long as they are kept. `by` and `reason` as for `rotate`.
        """
        check_tenant(tenant)
        check_words(by, reason)
        if confirm != tenant:
            raise InvalidInput("confirm", "must repeat the tenant whose payloads shall become unreadable for good")
        try:
            left = await self._keys.destroy(tenant, by=by, reason=reason)
        finally:
            self.forget(tenant)
        return [record.key_id for record in left]

    async def rewrap_keys(self) -> Rewrapped:
        """Wrap every key of every tenant with the newest master key; no payload is touched. Safe to repeat.

        Once nothing has failed, master keys that no key names any more can be taken away.
        """
        result = Rewrapped()
        after: str | None = None
        while page := await self._keys.page(after=after, limit=_PAGE):
            for record in page:
                if record.wrapped is None:
                    continue
                try:
                    wrapped = await self._wrap(_name(record), await self._unwrap(_KIND[record.purpose], record))
                except CannotOpen as error:
                    result.failed[record.key_id] = str(error)
                else:
                    if await self._keys.rewrap(record, master=wrapped.master, wrapped=wrapped.wrapped):
                        result.done.append(record.key_id)
            after = page[-1].key_id
        return result

    # ---------------------------------------------------------------- asking

    @property
    def _keys(self) -> Keys:
        if self._store is None:
            raise RuntimeError("this keyring is not bound to a store yet: keyring.bind(store.keys)")
        return self._store

    async def _newest(self, kind: type[K], tenant: str | None, claim_round: ClaimRound | None) -> K:
        purpose = _PURPOSE[kind]
        question = ("newest", tenant, purpose)

        async def find() -> str:
            found = await self._keys.newest_active(tenant, purpose)
            if found is not None:
                return found.key_id
            if not self._create_on_first_use:
                raise KeyLost(tenant, None, f"it has no active {purpose} key; make one: sagas keys create")
            await self._make(tenant, anew=False)
            found = await self._keys.newest_active(tenant, purpose)
            if found is None:
                raise KeyLost(tenant, None, f"its {purpose} key was destroyed while it was being made")
            return found.key_id

        key_id = await self._ask(question, find, claim_round)
        try:
            return await self._key(kind, tenant, key_id, claim_round)
        except KeyLost:
            self._known.pop(question, None)  # there may be a newer one by now
            raise

    async def _key(self, kind: type[K], tenant: str | None, key_id: str, claim_round: ClaimRound | None) -> K:
        purpose = _PURPOSE[kind]

        async def fetch() -> K:
            record = await self._keys.get(key_id)
            if record is None or record.tenant != tenant or record.purpose is not purpose:
                # Another tenant's key is as unknown as none: its owner's payloads do not open under this name.
                raise KeyLost(tenant, key_id, f"this tenant has no {purpose} key of that id, and left no trace of one")
            return await self._unwrap(kind, record)

        return await self._ask(("key", tenant, purpose, key_id), fetch, claim_round)

    async def _ask(self, question: Hashable, answer: Callable[[], Awaitable[T]], claim_round: ClaimRound | None) -> T:
        """The answer, from memory if it is young, else asked for once by all who want it now."""
        known = self._known.get(question)
        if known is not None and self._age_s(known) < self._max_age_s / 2:
            return cast("T", known.value)
        failure = self._remembered(question, claim_round)
        if failure is None:
            asked_before = question in self._flights
            flight = self._flight(question, answer)
            if known is not None and self._age_s(known) < self._max_age_s:
                # A service that hangs holds up nobody who has an answer at hand; the first who asks waits a little.
                await asyncio.wait({flight}, timeout=0 if asked_before else _REFRESH_S)
                if not flight.done():
                    return cast("T", known.value)
            outcome = await asyncio.shield(flight)
            if not isinstance(outcome, _Failure):
                return outcome
            failure = outcome
        if claim_round is not None:
            claim_round.failures[question] = failure
        if failure.passing and known is not None and self._age_s(known) < self._max_age_s:
            return cast("T", known.value)
        raise failure.error()

    def _age_s(self, known: _Known) -> float:
        return self._monotonic() - known.as_of

    def _remembered(self, question: Hashable, claim_round: ClaimRound | None) -> _Failure | None:
        if claim_round is not None and (failure := claim_round.failures.get(question)) is not None:
            return failure
        failure, until = self._resting.get(question, (None, 0.0))
        return failure if self._monotonic() < until else None

    def _flight(self, question: Hashable, answer: Callable[[], Awaitable[T]]) -> asyncio.Task[T | _Failure]:
        """One task per question, which outlives whoever began it: others wait for it too."""
        flight: asyncio.Task[T | _Failure] | None = self._flights.get(question)
        if flight is None:
            # In a context of its own: what all wait for must not stand under the deadline that one of them has set.
            flight = asyncio.create_task(self._outcome(question, answer), context=contextvars.Context())
            self._flights[question] = flight
            flight.add_done_callback(lambda ended: self._landed(question, ended))
        return flight

    def _landed(self, question: Hashable, flight: asyncio.Task[Any]) -> None:
        if self._flights.get(question) is flight:
            del self._flights[question]

    async def _outcome(self, question: Hashable, answer: Callable[[], Awaitable[T]]) -> T | _Failure:
        asked_at = self._monotonic()
        try:
            value = await answer()
        except Exception as error:
            failure = _failure(error)
            if failure.passing:
                self._resting[question] = (failure, self._monotonic() + self._pause_s)
            else:
                self._known.pop(question, None)
            self._sweep()
            return failure
        if self._flights.get(question) is asyncio.current_task():  # not forgotten meanwhile
            self._known[question] = _Known(value, asked_at)
        self._sweep()
        return value

    def _sweep(self) -> None:
        """Let go of keys that nobody asks for any more, now and then."""
        now = self._monotonic()
        if now - self._swept_at < self._max_age_s / 2:
            return
        self._swept_at = now
        self._known = {key: known for key, known in self._known.items() if now - known.as_of < self._max_age_s}
        self._resting = {key: (failure, until) for key, (failure, until) in self._resting.items() if now < until}

    def forget(self, tenant: str | None) -> None:
        """Whoever asks from now on is told anew, also where an answer is on its way."""
        self._known = {question: known for question, known in self._known.items() if _tenant_of(question) != tenant}
        self._flights = {
            question: flight for question, flight in self._flights.items() if _tenant_of(question) != tenant
        }

    # ---------------------------------------------------------------- making

    async def _make(self, tenant: str | None, *, anew: bool) -> str:
        """Make a tenant's keys, the lookup key first; returns the id of the data key that is active then.

        In this order a process that dies in between leaves a lookup key alone, which the next one recognises. A data
        key without a lookup key is therefore a loss, and a new lookup key would start orders a second time.
        """
        while True:
            present = await self._keys.list_of_tenant(tenant)
            active = {record.purpose: record.key_id for record in present if record.state is KeyState.ACTIVE}
            if Purpose.DATA in active and Purpose.LOOKUP not in active:
                raise KeyLost(tenant, None, "its lookup key is missing; finish its destruction, or restore the keys")
            if Purpose.DATA in active:
                return active[Purpose.DATA]
            had_keys = Purpose.LOOKUP not in active or any(one.purpose is Purpose.DATA for one in present)
            if present and had_keys and not anew:
                raise KeyLost(
                    tenant, None, "its keys were destroyed; to begin anew, without what they sealed: sagas keys create"
                )
            try:
                if Purpose.LOOKUP not in active:
                    await self._keys.insert_first(await self._draw(tenant, Purpose.LOOKUP))
                made = await self._keys.insert_first(await self._draw(tenant, Purpose.DATA))
            except KeyIdTaken:
                continue
            if made is not None:
                return made.key_id

    async def _draw(self, tenant: str | None, purpose: Purpose) -> NewKey:
        """A new random key, wrapped."""
        key_id = self._random_bytes(KEY_ID_BYTES).hex()
        name = KeyName(tenant=tenant, key_id=key_id, purpose=purpose)
        wrapped = await self._wrap(name, _KIND[purpose](tenant, key_id, self._random_bytes(KEY_BYTES)))
        return NewKey(key_id=key_id, tenant=tenant, purpose=purpose, master=wrapped.master, wrapped=wrapped.wrapped)

    # ---------------------------------------------------------------- the key service

    # A logger that prints the variables of a traceback's frames must find no key there. So keys are passed about in
    # objects that do not show them, and an error of a wrapper is raised anew, without the frames it came through.

    async def _wrap(self, name: KeyName, key: DataKey | LookupKey) -> Wrapped:
        return await self._bounded(name, self._wrapper.wrap(name, key.reveal()))

    async def _unwrap(self, kind: Callable[[str | None, str, bytes], T], record: KeyRecord) -> T:
        if record.wrapped is None:
            since = f" at {record.destroyed_at:%Y-%m-%d %H:%M:%S} UTC" if record.destroyed_at is not None else ""
            raise KeyLost(record.tenant, record.key_id, f"it was destroyed{since}")
        name = _name(record)

        async def unwrapped(wrapped: Wrapped) -> T:
            return kind(record.tenant, record.key_id, await self._wrapper.unwrap(name, wrapped))

        return await self._bounded(name, unwrapped(Wrapped(record.master, record.wrapped)))

    async def _bounded(self, name: KeyName, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return await call
        except CannotOpen as error:
            failure = _failure(error)
        except TimeoutError:
            why = f"the key service gave no answer within {self._call_timeout_s:g} s"
            failure = _failure(KeyUnavailable(name.tenant, name.key_id, why))
        except Exception as fault:
            # Not one of the answers that a wrapper may give, so nothing is concluded from it. Its text stays here.
            why = f"the key wrapper failed with {type(fault).__name__}"
            failure = _failure(KeyUnavailable(name.tenant, name.key_id, why))
        raise failure.error()


class NoKeys:
    """The twin for stores without a keyring: everything is stored as it is, and what is sealed is refused."""

    async def sealer(
        self,
        tenant: str | None,
        run_id: str,
        stored: Iterable[bytes | None] = (),  # noqa: ARG002 - the interface of a keyring
        *,
        claim_round: ClaimRound | None = None,  # noqa: ARG002
    ) -> Sealer:
        """What stores this run's payloads as they are."""
        return Unsealed(tenant, run_id)

    async def opener(
        self,
        tenant: str | None,
        run_id: str,
        stored: Iterable[bytes | None],  # noqa: ARG002 - the interface of a keyring
        *,
        claim_round: ClaimRound | None = None,  # noqa: ARG002
    ) -> Opener:
        """What reads this run's payloads as they are."""
        return Unsealed(tenant, run_id)

    async def lookup_key(self, tenant: str | None) -> LookupKey | None:  # noqa: ARG002
        """None: idempotency keys are stored as they are."""
        return None


_NO_KEYS: Final = NoKeys()


def keys_of(store: MongoStore) -> Keyring | NoKeys:
    """What seals and opens for this store. Raises InvalidInput when it was given something that is no keyring."""
    keyring = store.keyring
    if keyring is None:
        return _NO_KEYS
    return check_kind("keyring", keyring, Keyring, "MongoStore(database, keyring=Keyring(wrapper))")


def refuse_unkeyed(store: MongoStore, consequence: str) -> None:
    """Raise InvalidInput, which names the consequence, if the store has no keyring where payloads are sealed."""
    if store.keyring is None and store.holds_keys:
        raise InvalidInput(
            "keyring",
            f"payloads in this database are sealed, and {consequence}; give the store its keyring: "
            "MongoStore(database, keyring=...)",
        )


async def sealer_of(
    keys: Keyring | NoKeys, run: RunRecord, stored: bytes, *, claim_round: ClaimRound | None = None
) -> Sealer:
    """What opens `stored`, a payload of this run, and seals what follows from it. Raises as `Keyring.sealer` does.

    A run names every key that it is sealed with, and does so before the first payload is. A payload that names another
    was altered, or comes from elsewhere: to call that key lost would have somebody look for what never was.
    """
    if isinstance(keys, Keyring) and (strange := keys_needed([stored]) - set(run.keys)):
        raise Tampered(
            run.tenant, min(strange), f"run {run.run_id} has a payload under this key, which is none of the run's own"
        )
    return await keys.sealer(run.tenant, run.run_id, [stored], claim_round=claim_round)


class Opened(NamedTuple):
    """Words stored with a run, or why they cannot be shown; both None where there are none."""

    text: str | None = None
    unopened: str | None = None


async def opened_text(keys: Keyring | NoKeys, run: RunRecord, slot: Slot, seq: int, stored: bytes | None) -> Opened:
    """Words stored with a run, if they open here and now."""
    if stored is None:
        return Opened()
    try:
        async with asyncio.timeout(WORDS_PATIENCE_S):
            opener = await keys.opener(run.tenant, run.run_id, [stored])
        return Opened(load_text(opener.open(slot, seq, stored), f"run {run.run_id}, {slot}"))
    except (CannotOpen, Unreadable, StoreUnavailable) as cannot:
        return Opened(unopened=str(cannot))
    except TimeoutError:
        return Opened(unopened=f"its key was not to be had within {WORDS_PATIENCE_S:g} s")


def _name(record: KeyRecord) -> KeyName:
    return KeyName(tenant=record.tenant, key_id=record.key_id, purpose=record.purpose)


def _tenant_of(question: Hashable) -> str | None:
    return cast("tuple[str, str | None]", question)[1]


def _failure(error: Exception) -> _Failure:
    """Why there is no answer, such that each who asked can be told in an exception of its own."""
    if isinstance(error, CannotOpen):
        kind, tenant, key_id, why = type(error), error.tenant, error.key_id, error.why
        return _Failure(lambda: kind(tenant, key_id, why), passing=error.failure is OpenFailure.TRANSIENT)
    if isinstance(error, StoreUnavailable):
        operation, cause = error.operation, error.cause
        return _Failure(lambda: StoreUnavailable(operation, cause), passing=True)
    return _Failure(lambda: error, passing=False)
