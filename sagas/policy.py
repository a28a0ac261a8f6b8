"""When a step is tried again: the policy that a definition states, and what an exception means to it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, cast

import tenacity

from sagas.errors import NonRetryable, Retryable, StoreUnavailable
from sagas_store.faults import is_transient

__all__ = ["COMPENSATION_RETRY", "FORWARD_RETRY", "STEP_RETRY", "Failure", "RetryPolicy"]


_LOST_REPLIES: Final = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.HTTPClientError",
        "httpx.TransportError",
        "redis.exceptions.ConnectionError",
        "redis.exceptions.TimeoutError",
        "requests.exceptions.ChunkedEncodingError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "stripe._error.APIConnectionError",
        "urllib3.exceptions.MaxRetryError",
        "urllib3.exceptions.ProtocolError",
        "urllib3.exceptions.TimeoutError",
    }
)
"""Under which classes well-known clients raise timeouts and lost connections that are not Python's own. By name, so
none of them is needed here; docs/writing-sagas.md lists them."""


def _is_lost_reply(kind: type[BaseException]) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" in _LOST_REPLIES for base in kind.__mro__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is known of a try that did not succeed."""

    retryable: bool
    in_doubt: bool
    """Whether its effect may have happened all the same."""
    retry_after: timedelta | None = None
    conclusive: bool = False
    """The author's own word, NonRetryable: it did not happen, under this key, and an earlier try did not either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and when a step is tried again. Tries are counted in the journal, so the count survives crashes.

    A try that was broken off by a crash or a drain counts for nothing: only what the step itself raised does.
    """

    max_attempts: int | None = 5
    """Tries in all, the first included; None leaves the bound to `max_elapsed`."""
    max_elapsed: timedelta | None = None
    """No further try begins later than this after the first failure; None means no such bound."""
    initial_wait: timedelta = timedelta(milliseconds=200)
    """The wait after the first failure; each further one is twice as long."""
    max_wait: timedelta = timedelta(seconds=60)
    """No wait is longer than this."""
    jitter: bool = True
    """Draw each wait evenly between half of it and all of it: runs that failed together do not return together."""
    retry_on: tuple[type[BaseException], ...] = ()
    """Further exceptions to retry, beside the transient ones; their effect counts as in doubt."""
    retry_everything: bool = False
    """Retry whatever is raised but NonRetryable. For work that has to be done in the end."""

    def __post_init__(self) -> None:
        for name in ("initial_wait", "max_wait", "max_elapsed"):
            value = getattr(self, name)
            if not isinstance(value, timedelta) and not (name == "max_elapsed" and value is None):
                raise TypeError(f"RetryPolicy.{name} must be a timedelta, not {value!r}")
            if value is not None and value < timedelta(0):
                raise ValueError(f"RetryPolicy.{name} must not be negative")
        if self.max_attempts is not None and not isinstance(self.max_attempts, int):
            raise TypeError(f"RetryPolicy.max_attempts must be a whole number, not {self.max_attempts!r}")
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"RetryPolicy.max_attempts must be at least 1, not {self.max_attempts}")
        if self.max_attempts is None and self.max_elapsed is None:
            raise ValueError("RetryPolicy needs max_attempts or max_elapsed: without a bound a run never comes to rest")
        if not isinstance(self.retry_on, tuple) or not all(
            isinstance(one, type) and issubclass(one, BaseException) for one in self.retry_on
        ):
            raise TypeError(f"RetryPolicy.retry_on must be a tuple of exception classes, not {self.retry_on!r}")

    def failure(self, error: BaseException) -> Failure:
        """What `error`, raised by a step, means.

        Transient (timeouts, lost connections, those of well-known clients included, MongoDB's own passing errors,
        `retry_on`): retried, and in doubt, because the effect may have happened before the answer was lost. Retryable:
        retried. Everything else is definite.
        """
        if isinstance(error, Retryable):
            return Failure(retryable=True, in_doubt=error.in_doubt, retry_after=error.retry_after)
        if isinstance(error, NonRetryable):
            return Failure(retryable=False, in_doubt=False, conclusive=True)
        transient = (TimeoutError, ConnectionError, StoreUnavailable, *self.retry_on)
        lost = isinstance(error, transient) or is_transient(error) or _is_lost_reply(type(error))
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
        return timedelta(seconds=longest)


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
