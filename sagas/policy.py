"""When a step is tried again: the policy that a definition states, and what an exception means to it."""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, cast

import tenacity

from sagas.errors import InvalidInput, NonRetryable, Retryable, pause_of
from sagas_store.faults import is_transient
from sagas_store.inputs import check_flag, kind_of
from sagas_store.numbers import DURATION_MAX, NONE, DurationField, check_count

__all__ = ["COMPENSATION_RETRY", "FORWARD_RETRY", "STEP_RETRY", "Failure", "RetryPolicy"]


_LOST_REPLIES: Final = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.HTTPClientError",
        "builtins.ConnectionError",
        "builtins.EOFError",  # a stream that ended early: asyncio.IncompleteReadError, ftplib, multiprocessing
        "builtins.TimeoutError",
        "concurrent.futures.process.BrokenProcessPool",
        "http.client.BadStatusLine",
        "http.client.IncompleteRead",
        "http.client.LineTooLong",
        "httpx.TransportError",
        "multiprocessing.context.TimeoutError",
        "redis.exceptions.ConnectionError",
        "redis.exceptions.TimeoutError",
        "requests.exceptions.ChunkedEncodingError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "sagas_store.errors.StoreUnavailable",
        "smtplib.SMTPServerDisconnected",
        "socket.gaierror",
        "ssl.SSLError",
        "stripe._error.APIConnectionError",
        "subprocess.TimeoutExpired",
        "urllib.error.ContentTooShortError",
        "urllib3.exceptions.MaxRetryError",
        "urllib3.exceptions.ProtocolError",
        "urllib3.exceptions.TimeoutError",
    }
)
"""Under which classes Python's own library and well-known clients raise timeouts and lost connections. By name, so none
of them is needed here; docs/writing-sagas.md lists them."""

_NEVER_SENT: Final = frozenset({"ssl.SSLCertVerificationError"})
"""Which of these say for certain that nothing was asked of the other side."""

_LOST_ERRNOS: Final = frozenset(
    getattr(errno, name, None)  # some systems lack some
    for name in (
        "ECOMM", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH",
        "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOBUFS", "ENONET", "ENOTCONN",
        "EPIPE", "EPROTO", "ESHUTDOWN", "ETIMEDOUT",
    )
)  # fmt: skip
"""The network's faults that Python has no class for, and those that it has one for, in an OSError of somebody's own."""

_WRAPPERS: Final = {"tenacity.RetryError": "__cause__", "urllib.error.URLError": "reason"}
"""What holds the exception that counts, and where."""


def _is_lost_reply(error: BaseException) -> bool:
    names = _names(error)
    if not names.isdisjoint(_NEVER_SENT):
        return False
    number = error.errno if isinstance(error, OSError) else None
    return not names.isdisjoint(_LOST_REPLIES) or (isinstance(number, int) and number in _LOST_ERRNOS)


def _names(error: BaseException) -> frozenset[str]:
    return frozenset(f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__)


def _held_in(error: BaseException) -> list[BaseException]:
    """What a group of exceptions or a wrapper of one holds; nothing in any other."""
    if isinstance(error, BaseExceptionGroup):
        return list(error.exceptions)
    names = _names(error)
    held = [getattr(error, place, None) for wrapper, place in _WRAPPERS.items() if wrapper in names]
    return [one for one in held if isinstance(one, BaseException)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is known of a try that did not succeed."""

    retryable: bool
    in_doubt: bool
    """Whether its effect may have happened all the same."""
    retry_after: timedelta | None = None
    conclusive: bool = False
    """The author's own word, NonRetryable: it did not happen, under this key, and an earlier try did not either."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often and when a step is tried again. Tries are counted in the journal, so the count survives crashes.

    Times are a timedelta, or seconds.

    A try that was broken off by a crash or a drain counts for nothing: only what the step itself raised does.
    """

    max_attempts: int | None = 5
    """Tries in all, the first included; None leaves the bound to `max_elapsed`."""
    max_elapsed: DurationField[timedelta | None] = DurationField(None, least=NONE, most=timedelta.max)
    """No further try begins later than this after the first failure; None means no such bound."""
    initial_wait: DurationField[timedelta] = DurationField(timedelta(milliseconds=200), least=NONE, most=timedelta.max)
    """The wait after the first failure; each further one is twice as long."""
    max_wait: DurationField[timedelta] = DurationField(timedelta(seconds=60), least=NONE, most=timedelta.max)
    """No wait is longer than this."""
    jitter: bool = True
    """Draw each wait evenly between half of it and all of it: runs that failed together do not return together."""
    retry_on: tuple[type[BaseException], ...] = ()
    """Further exceptions to retry, beside the transient ones; their effect counts as in doubt."""
    retry_everything: bool = False
    """Retry whatever is raised but NonRetryable. For work that has to be done in the end."""

    def __post_init__(self) -> None:
        if self.max_attempts is not None:
            check_count("RetryPolicy.max_attempts", self.max_attempts, most=sys.maxsize)
        elif self.max_elapsed is None:
            raise InvalidInput(
                "RetryPolicy", "needs max_attempts or max_elapsed: without a bound a run never comes to rest"
            )
        if not isinstance(self.retry_on, tuple) or not all(
            isinstance(one, type) and issubclass(one, BaseException) for one in self.retry_on
        ):
            given = kind_of(self.retry_on)
            raise InvalidInput("RetryPolicy.retry_on", f"must be a tuple of exception classes, not {given}: (OSError,)")
        for name in ("jitter", "retry_everything"):
            check_flag(f"RetryPolicy.{name}", getattr(self, name))

    def failure(self, error: BaseException) -> Failure:
        """What `error`, raised by a step, means.

        Transient (timeouts, lost connections, those of well-known clients included, MongoDB's own passing errors,
        `retry_on`): retried, and in doubt, because the effect may have happened before the answer was lost. Retryable:
        retried. Everything else is definite. A group is in doubt as soon as one in it is, and retried only if all are.
        """
        meant = [self._meaning(one) for one in self._meant(error)]
        return Failure(
            retryable=all(one.retryable for one in meant),
            in_doubt=any(one.in_doubt for one in meant),
            retry_after=max((one.retry_after for one in meant if one.retry_after is not None), default=None),
            # Said for itself alone: beside one that says so, others of its group were broken off and say nothing.
            conclusive=isinstance(error, NonRetryable),
        )

    def _meant(self, error: BaseException) -> list[BaseException]:
        """The exceptions that count: `error` itself, or those that it only holds."""
        said = (Retryable, NonRetryable, *self.retry_on)
        found: list[BaseException] = []
        left, seen = [error], {id(error)}
        while left:
            one = left.pop()
            held = [] if isinstance(one, said) else _held_in(one)
            if not held:
                found.append(one)
            new = [inner for inner in held if id(inner) not in seen]  # one may hold itself
            left += new
            seen.update(map(id, new))
        return found or [error]

    def _meaning(self, error: BaseException) -> Failure:
        if isinstance(error, Retryable):
            try:
                return Failure(retryable=True, in_doubt=bool(error.in_doubt), retry_after=pause_of(error.retry_after))
            except Exception:  # of a subclass's own
                return Failure(retryable=True, in_doubt=True)
        if isinstance(error, NonRetryable):
            return Failure(retryable=False, in_doubt=False)
        lost = isinstance(error, self.retry_on) or is_transient(error) or _is_lost_reply(error)
        return Failure(retryable=lost or self.retry_everything, in_doubt=lost)

    def allows(self, tries: int, elapsed: timedelta) -> bool:
        """Whether another try may begin after `tries` failed ones, `elapsed` after the first of them failed."""
        if self.max_attempts is not None and tries >= self.max_attempts:
            return False
        return self.max_elapsed is None or elapsed <= self.max_elapsed

    def wait(self, tries: int) -> timedelta:
        """The wait before the next try after `tries` failed ones. Random where `jitter` is on."""
        state = tenacity.RetryCallState(cast("Any", None), None, (), {})
        state.attempt_number = tries
        longest = tenacity.wait_exponential(
            multiplier=self.initial_wait.total_seconds(), max=self.max_wait.total_seconds()
        )(state)
        if self.jitter:
            longest = longest / 2 + tenacity.wait_random(0, longest / 2)(state)
        return timedelta(seconds=min(longest, DURATION_MAX.total_seconds()))


STEP_RETRY: Final = RetryPolicy()
"""Before and at the pivot: five tries within some seconds, since somebody is waiting and turning back is possible."""

COMPENSATION_RETRY: Final = RetryPolicy(
    max_attempts=12, initial_wait=timedelta(seconds=2), max_wait=timedelta(minutes=5)
)
"""A rollback wants to be finished: twelve tries, about half an hour; then an operator must act."""

FORWARD_RETRY: Final = RetryPolicy(
    max_attempts=None, max_elapsed=timedelta(days=3), max_wait=timedelta(minutes=5), retry_everything=True
)
"""After the pivot there is no way back: whatever is raised is retried for three days, at most five minutes apart."""
