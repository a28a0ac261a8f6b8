"""Driver errors, sorted once: what passes by itself is repeated here, the rest gets a name of ours.

An engine fault is never a step's outcome. So every operation of the store is written to be safe when repeated, and
repeated it is, for as long as the store's patience lasts: a failover, a lost connection, a write concern that was not
reached. What lasts longer surfaces as StoreUnavailable, and the caller knows no more than before.
"""

from __future__ import annotations

import asyncio
import functools
import math
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Final, TypeVar

import pymongo
import tenacity
from pymongo import errors

from sagas_store.clock import monotonic
from sagas_store.errors import NoConnection, StoreError, StoreRefused, StoreUnavailable
from sagas_store.numbers import COUNT_MAX, check_duration

__all__ = [
    "AbortedTransaction",
    "Patience",
    "cancellations",
    "describe",
    "is_aborted_transaction",
    "is_transient",
    "is_worth_committing_again",
]

T = TypeVar("T")

_TRANSIENT_CODES: Final = frozenset(
    {
        6, 7, 89, 91, 189, 202, 262, 317, 358, 384, 9001, 10107, 11600, 11602, 13435, 13436,  # not primary, going down
        24, 46, 50, 64, 79, 100, 112, 134, 175, 251,  # locks, time limits, write concern, write conflicts, killed plans
        133, 150, 234, 63, 13388, 43, 136, 237,  # no such host for the shard, stale routing, cursors lost on failover
    }
)  # fmt: skip
"""Server error codes that say "not now" rather than "no" (mongo/base/error_codes.yml, retriable and interruption)."""

_LIMIT_MAX: Final = timedelta(milliseconds=COUNT_MAX)
"""The longest time limit that the server takes with an operation."""

_REPLY_LEAST_S: Final = 0.001
"""The server counts milliseconds, and the driver takes none at all for no limit."""

_TRANSIENT_LABELS: Final = ("RetryableWriteError", "RetryableError", "TransientTransactionError")


def is_transient(error: BaseException) -> bool:
    """Whether a driver error says nothing about the operation but that it did not get through this time.

    The operation may have happened all the same: a reply can be lost after the write was made.
    """
    if isinstance(error, errors.BulkWriteError):
        details = error.details
        return bool(details.get("writeConcernErrors")) or any(
            failed.get("code") in _TRANSIENT_CODES for failed in details.get("writeErrors", ())
        )
    if not isinstance(error, errors.PyMongoError):
        return False
    if isinstance(error, errors.ConnectionFailure | errors.WriteConcernError | errors.ExecutionTimeout):
        return True
    if error.timeout or any(error.has_error_label(label) for label in _TRANSIENT_LABELS):
        return True
    return isinstance(error, errors.OperationFailure) and error.code in _TRANSIENT_CODES


class AbortedTransaction(errors.PyMongoError):
    """An operation of ours inside a transaction did not get through, so the transaction is given up before its commit.

    The server labels most such faults itself; time limits, for one, it does not.
    """


def cancellations() -> int:
    """How often the running task has been asked to end."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def is_aborted_transaction(error: BaseException) -> bool:
    """Whether the server (or the driver for it) says that nothing of the transaction has happened."""
    return isinstance(error, AbortedTransaction) or (
        isinstance(error, errors.PyMongoError) and error.has_error_label("TransientTransactionError")
    )


def is_worth_committing_again(error: BaseException) -> bool:
    """Whether a commit's outcome is unknown and asking again may tell; not so when the transaction is gone."""
    return is_transient(error) and not is_aborted_transaction(error)


_MEANING: Final = {
    13: "not authorized: the user lacks a right that this needs, or no user was given; readWrite is what a store needs",
    18: "authentication failed: user, password or authSource in the connection string is wrong",
}
"""What a person can do something about, by the server's code."""


def describe(error: BaseException) -> str:
    """The error's kind and code, and what it means. Never its text: the server quotes documents in it."""
    code = getattr(error, "code", None)
    meaning = f": {_MEANING[code]}" if code in _MEANING else ""
    return type(error).__name__ + (f", code {code}" if code else "") + meaning


class Patience:
    """How long the store repeats an operation that does not get through, and how long it waits for one reply."""

    def __init__(
        self,
        total: timedelta | float,
        reply: timedelta | float,
        *,
        at_once: int | asyncio.Semaphore = sys.maxsize,
        unanswered: Callable[[], str] | None = None,
    ) -> None:
        """`total` bounds all tries of one operation together, `reply` bounds each of them.

        `unanswered` says, for the error, what is known of the servers when none could be found.

        No more than `at_once` are under way at the same time; who comes later waits, and is served in turn. A semaphore
        is a bound that is shared with others. The driver's own queue for a connection is not fair: under load some
        would wait in it until their time is over. Nothing that is under way waits here for another turn. In the server
        it may wait, and keeps its turn: a write that meets an open transaction waits until that has ended, whose
        commit may be waiting for a turn here. `reply` ends such a wait, and with it the turn.
        """
        self.total_s = check_duration("patience", total, most=_LIMIT_MAX).total_seconds()
        self.reply_s = min(check_duration("reply", reply, most=_LIMIT_MAX).total_seconds(), self.total_s)
        self._unanswered = unanswered
        self._turn = at_once if isinstance(at_once, asyncio.Semaphore) else asyncio.Semaphore(at_once)

    async def call(
        self,
        operation: str,
        attempt: Callable[[], Awaitable[T]],
        *,
        passes: Callable[[BaseException], bool] = is_transient,
        within_s: float = math.inf,
    ) -> T:
        """Await `attempt()` until it gets through; `passes` tells the errors that are worth repeating it for.

        It must be safe to repeat after it took effect. `within_s` is for what has less time than the whole patience:
        its turn, its replies and its repeats together. Raises StoreUnavailable once patience is spent, StoreRefused
        when the server refused for good. Duplicate keys and documents over the limit pass through untouched: they are
        answers, and the caller knows what they mean.
        """
        begun = monotonic()
        total_s = min(self.total_s, within_s)
        try:
            return await self.once(attempt, total_s)  # the ordinary case pays for no retry machinery
        except errors.PyMongoError as error:
            first = error
        left_s = total_s - (monotonic() - begun)
        if left_s <= 0 or not passes(first):
            raise self._named(operation, first) from first
        try:
            with pymongo.timeout(left_s):  # each try ends with the whole, where that is nearer than a reply's limit
                return await self._again(functools.partial(self.once, attempt, left_s), passes, left_s)
        except errors.PyMongoError as error:
            raise self._named(operation, error) from None

    async def once(self, attempt: Callable[[], Awaitable[T]], within_s: float = math.inf) -> T:
        """Await `attempt()` once, for no longer than one reply is waited for. Driver errors pass through.

        Its turn has to come within `within_s`, or the whole patience, else WaitQueueTimeoutError; its reply in what is
        left then.
        """
        left_s = min(self.total_s, within_s)
        if self._turn.locked():
            begun = monotonic()
            try:
                async with asyncio.timeout(left_s):
                    await self._turn.acquire()
            except TimeoutError:
                raise errors.WaitQueueTimeoutError("too many operations are before this one") from None
            left_s -= monotonic() - begun
        else:
            await self._turn.acquire()  # at once
        try:
            return await self._in_turn(attempt, min(self.reply_s, left_s))
        finally:
            self._turn.release()

    async def _in_turn(self, attempt: Callable[[], Awaitable[T]], reply_s: float) -> T:
        asked = cancellations()
        # The driver's own deadline, sent to the server too: without it a silent network holds a reply for ever.
        try:
            with pymongo.timeout(max(reply_s, _REPLY_LEAST_S)):
                result = await attempt()
        except errors.PyMongoError:
            if cancellations() > asked:
                # The driver took our cancellation for a lost connection. To go on would be to swallow it.
                raise asyncio.CancelledError from None
            raise
        if cancellations() > asked:
            raise asyncio.CancelledError  # lost by the driver on the way to its answer
        return result

    async def once_in_transaction(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Await an operation of the store's own inside a transaction. Raises AbortedTransaction on a passing fault."""
        try:
            return await self.once(attempt)
        except errors.PyMongoError as error:
            if is_transient(error) and not is_aborted_transaction(error):
                raise AbortedTransaction(describe(error)) from error
            raise

    async def transact(self, transaction: Callable[[], Awaitable[T]]) -> T:
        """Await a whole transaction, again when it was aborted by a passing fault, so that nothing of it happened.

        Other errors of whatever runs inside pass through as they are. Raises StoreUnavailable once patience is spent.
        """
        try:
            return await self._again(transaction, is_aborted_transaction, self.total_s)
        except errors.PyMongoError as error:
            if is_aborted_transaction(error):
                raise StoreUnavailable("transaction", describe(error)) from None
            raise

    async def _again(
        self, attempt: Callable[[], Awaitable[T]], passes: Callable[[BaseException], bool], within_s: float
    ) -> T:
        again = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(passes),
            wait=tenacity.wait_random_exponential(multiplier=0.02, max=1.0),
            stop=tenacity.stop_after_delay(within_s),
            reraise=True,
        )
        return await again(attempt)

    def _named(self, operation: str, error: errors.PyMongoError) -> StoreError:
        """The error under our name. Re-raises what the caller reads better: answers, and aborted transactions."""
        if is_aborted_transaction(error):
            raise error
        if is_transient(error):
            cause = describe(error)
            if isinstance(error, errors.ServerSelectionTimeoutError) and self._unanswered is not None:
                cause += f": {self._unanswered()}"
            return StoreUnavailable(operation, cause)
        if isinstance(error, errors.ConfigurationError):  # found out by the driver, when it first looked for a server
            return NoConnection(f"{operation}: the connection string does not lead to a server ({describe(error)})")
        if isinstance(error, errors.DuplicateKeyError | errors.BulkWriteError | errors.DocumentTooLarge):
            raise error
        return StoreRefused(operation, describe(error))
