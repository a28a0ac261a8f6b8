"""When a step is tried again: what an exception means, how often, and after how long."""

import asyncio
import errno
import http.client
import importlib
import multiprocessing
import smtplib
import socket
import ssl
import subprocess
import urllib.error
from concurrent.futures.process import BrokenProcessPool
from dataclasses import FrozenInstanceError, replace
from datetime import timedelta
from decimal import Decimal
from email.message import Message
from typing import Any

import aiohttp
import botocore.exceptions
import httpx
import pytest
import redis
import requests
import stripe
import tenacity
import urllib3
from hypothesis import given
from hypothesis import strategies as st
from pymongo import errors as mongo

from sagas.errors import InvalidInput, NonRetryable, Retryable
from sagas.policy import _LOST_REPLIES, COMPENSATION_RETRY, FORWARD_RETRY, STEP_RETRY, Failure, RetryPolicy
from sagas_store.numbers import DURATION_MAX

SECOND = timedelta(seconds=1)


class Busy(Exception):
    """Something of the application's own."""


class VeryBusy(Busy):
    pass


class OSErrorOfALibrary(OSError):
    """Python gives its own classes (TimeoutError for ETIMEDOUT) to plain ones only."""


def tenacity_says(error: Exception) -> tenacity.RetryError:
    """What a function comes to that is decorated with tenacity's `retry`."""

    @tenacity.retry(stop=tenacity.stop_after_attempt(1))
    def charge() -> None:
        raise error

    with pytest.raises(tenacity.RetryError) as gave_up:
        charge()
    return gave_up.value


def itself() -> urllib.error.URLError:
    error = urllib.error.URLError("")
    error.reason = error
    return error


def failure(*, retryable: bool, in_doubt: bool, retry_after: timedelta | None = None) -> Failure:
    return Failure(retryable=retryable, in_doubt=in_doubt, retry_after=retry_after)


LOST = failure(retryable=True, in_doubt=True)
TURNED_AWAY = failure(retryable=True, in_doubt=False)
DEFINITE = failure(retryable=False, in_doubt=False)
CONCLUSIVE = Failure(retryable=False, in_doubt=False, conclusive=True)


# -------------------------------------------------------------------- what an exception means


@pytest.mark.parametrize(
    ("error", "means"),
    [
        (TimeoutError(), LOST),
        (ConnectionError(), LOST),
        (ConnectionResetError(), LOST),
        (BrokenPipeError(), LOST),
        (mongo.AutoReconnect(), LOST),
        (mongo.NetworkTimeout(), LOST),
        (mongo.ServerSelectionTimeoutError(), LOST),
        (mongo.NotPrimaryError(), LOST),
        (mongo.WriteConcernError("not reached", 64), LOST),
        (mongo.ExecutionTimeout("too long", 50), LOST),
        (mongo.OperationFailure("stepped down", 189), LOST),
        (mongo.OperationFailure("write conflict", 112), LOST),
        (mongo.OperationFailure("shutting down", 91, {"errorLabels": ["RetryableWriteError"]}), LOST),
        (mongo.OperationFailure("not allowed", 13), DEFINITE),
        (mongo.DuplicateKeyError("there already", 11000), DEFINITE),
        (mongo.InvalidOperation(), DEFINITE),
        (OSError("disk full"), DEFINITE),
        (ValueError(), DEFINITE),
        (KeyError("sku"), DEFINITE),
        (Busy(), DEFINITE),
        (SystemExit(1), DEFINITE),
        # Python's own library.
        (asyncio.IncompleteReadError(b"HTTP/1.1 2", None), LOST),
        (EOFError(), LOST),
        (http.client.IncompleteRead(b"{"), LOST),
        (http.client.BadStatusLine("HTP"), LOST),
        (http.client.RemoteDisconnected("closed"), LOST),
        (http.client.LineTooLong("header line"), LOST),
        (http.client.InvalidURL("http:"), DEFINITE),
        (urllib.error.URLError(TimeoutError()), LOST),
        (urllib.error.URLError(OSError(errno.EHOSTUNREACH, "No route to host")), LOST),
        (urllib.error.URLError(ssl.SSLCertVerificationError("expired")), DEFINITE),
        (urllib.error.URLError(FileNotFoundError("no such file")), DEFINITE),
        (urllib.error.URLError("unknown url type: htp"), DEFINITE),
        (urllib.error.HTTPError("http://x", 402, "declined", Message(), None), DEFINITE),
        (urllib.error.ContentTooShortError("cut off", ("", Message())), LOST),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), LOST),
        (ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), LOST),
        (ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed (EOF)"), LOST),
        (ssl.SSLError(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC]"), LOST),
        (ssl.SSLCertVerificationError("expired"), DEFINITE),
        (smtplib.SMTPServerDisconnected(), LOST),
        (smtplib.SMTPDataError(554, b"refused"), DEFINITE),
        (subprocess.TimeoutExpired("pay", 10), LOST),
        (subprocess.CalledProcessError(1, "pay"), DEFINITE),
        (multiprocessing.TimeoutError(), LOST),
        (BrokenProcessPool(), LOST),
        # What holds another.
        (tenacity_says(TimeoutError()), LOST),
        (tenacity_says(ValueError()), DEFINITE),
        (ExceptionGroup("one", [TimeoutError()]), LOST),
        (ExceptionGroup("two", [ExceptionGroup("one", [EOFError()]), ConnectionError()]), LOST),
        (ExceptionGroup("two", [ValueError(), TimeoutError()]), failure(retryable=False, in_doubt=True)),
        (ExceptionGroup("two", [Retryable(retry_after=SECOND), Retryable()]), replace(TURNED_AWAY, retry_after=SECOND)),
        (ExceptionGroup("one", [NonRetryable()]), DEFINITE),  # others of its group were broken off
        (itself(), DEFINITE),
        (NonRetryable("card declined"), CONCLUSIVE),
        (Retryable("later"), TURNED_AWAY),
        (Retryable(in_doubt=True), LOST),
        (Retryable(retry_after=SECOND), failure(retryable=True, in_doubt=False, retry_after=SECOND)),
        (Retryable(retry_after=SECOND, in_doubt=True), failure(retryable=True, in_doubt=True, retry_after=SECOND)),
    ],
    ids=repr,
)
def test_what_passes_by_itself_is_retried_and_everything_else_is_definite(error: BaseException, means: Failure) -> None:
    assert STEP_RETRY.failure(error) == means


@pytest.mark.parametrize(
    ("error", "means"),
    [
        (httpx.ReadTimeout("slow"), LOST),
        (httpx.ConnectError("refused"), LOST),
        (httpx.RemoteProtocolError("cut off"), LOST),
        (
            httpx.HTTPStatusError("402", request=httpx.Request("POST", "http://x"), response=httpx.Response(402)),
            DEFINITE,
        ),
        (requests.exceptions.ReadTimeout(), LOST),
        (requests.exceptions.ConnectionError(), LOST),
        (requests.exceptions.HTTPError("402"), DEFINITE),
        (urllib3.exceptions.ProtocolError("cut off"), LOST),
        (urllib3.exceptions.LocationParseError("http:"), DEFINITE),
        (aiohttp.ServerDisconnectedError(), LOST),
        (aiohttp.ServerTimeoutError(), LOST),
        (aiohttp.ClientPayloadError(), LOST),
        (aiohttp.InvalidURL("http:"), DEFINITE),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="http://x"), LOST),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"), LOST),
        (botocore.exceptions.ClientError({}, "Charge"), DEFINITE),
        (redis.exceptions.TimeoutError(), LOST),
        (redis.exceptions.ConnectionError(), LOST),
        (redis.exceptions.ResponseError(), DEFINITE),
        (stripe.APIConnectionError("no answer"), LOST),  # type: ignore[no-untyped-call]
        (stripe.CardError("declined", "number", "card_declined"), DEFINITE),  # type: ignore[no-untyped-call]
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__qualname__}" if isinstance(value, Exception) else "",
)
def test_a_reply_that_a_well_known_client_lost_is_in_doubt(error: BaseException, means: Failure) -> None:
    assert STEP_RETRY.failure(error) == means


@pytest.mark.parametrize("name", sorted(_LOST_REPLIES))
def test_what_stands_for_a_lost_reply_exists_under_that_name(name: str) -> None:
    module, _, kind = name.rpartition(".")
    found = getattr(importlib.import_module(module), kind)
    assert f"{found.__module__}.{found.__qualname__}" == name


@pytest.mark.parametrize("kind", [OSError, OSErrorOfALibrary])
@pytest.mark.parametrize("name", ["EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "ETIMEDOUT", "EPIPE", "ECONNRESET"])
def test_a_fault_of_the_network_is_a_lost_reply_whatever_class_it_comes_in(kind: type[OSError], name: str) -> None:
    assert STEP_RETRY.failure(kind(getattr(errno, name), "so the system says")) == LOST


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOENT, "http://x", []])
def test_any_other_fault_of_the_system_is_definite(number: Any) -> None:
    assert STEP_RETRY.failure(OSError(number, "so the system says")) == DEFINITE


@pytest.mark.parametrize("error", [Busy(), VeryBusy()], ids=repr)
def test_what_the_definition_adds_is_retried_and_leaves_doubt(error: Exception) -> None:
    assert RetryPolicy(retry_on=(KeyError, Busy)).failure(error) == LOST


def test_what_the_definition_does_not_add_stays_definite() -> None:
    assert RetryPolicy(retry_on=(VeryBusy,)).failure(Busy()) == DEFINITE


def test_what_the_definition_adds_counts_as_it_stands_whatever_it_holds() -> None:
    error = urllib.error.URLError(ValueError())
    assert RetryPolicy(retry_on=(urllib.error.URLError,)).failure(error) == LOST
    assert RetryPolicy(retry_on=(ExceptionGroup,)).failure(ExceptionGroup("one", [ValueError()])) == LOST
    assert RetryPolicy(retry_on=(Busy,)).failure(ExceptionGroup("one", [Busy()])) == LOST


def test_retrying_everything_leaves_no_doubt_where_there_is_none() -> None:
    policy = RetryPolicy(retry_everything=True)
    assert policy.failure(ValueError()) == TURNED_AWAY
    assert policy.failure(TimeoutError()) == LOST


@pytest.mark.parametrize(
    "policy", [FORWARD_RETRY, RetryPolicy(retry_on=(Exception,)), RetryPolicy(retry_on=(NonRetryable,))], ids=repr
)
def test_a_step_that_says_so_is_never_retried(policy: RetryPolicy) -> None:
    assert policy.failure(NonRetryable()) == CONCLUSIVE


def test_a_step_that_says_so_is_not_in_doubt_although_its_kind_was_added() -> None:
    assert RetryPolicy(retry_on=(Retryable,)).failure(Retryable()) == TURNED_AWAY


# -------------------------------------------------------------------- what somebody asks for by Retryable


class Unprepared(Retryable):
    """Does not call the __init__ that it inherits."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


class Unwilling(Retryable):
    """Does not even say what it wants."""

    @property
    def in_doubt(self) -> bool:
        raise RuntimeError("not now")

    @in_doubt.setter
    def in_doubt(self, value: bool) -> None: ...


@pytest.mark.parametrize(
    ("given", "means"),
    [
        (None, None),
        (SECOND, SECOND),
        (5, 5 * SECOND),
        (0.5, SECOND / 2),
        ("5", 5 * SECOND),  # as HTTP has it
        (" 120 ", 120 * SECOND),
        (Decimal(5), 5 * SECOND),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None),
        ("", None),
        (float("nan"), None),
        ("nan", None),
        (float("-inf"), None),
        ([5], None),
        (object(), None),
        (timedelta.max, DURATION_MAX),
        (float("inf"), DURATION_MAX),
        (1e15, DURATION_MAX),
        ("1e400", DURATION_MAX),
    ],
)
@pytest.mark.parametrize("kind", [Retryable, Unprepared])
def test_a_pause_that_is_asked_for_is_taken_as_far_as_it_can_be_read(
    kind: type[Retryable], given: Any, means: timedelta | None
) -> None:
    assert STEP_RETRY.failure(kind(retry_after=given)) == failure(retryable=True, in_doubt=False, retry_after=means)


def test_a_retryable_that_was_never_set_up_asks_for_nothing() -> None:
    assert STEP_RETRY.failure(Unprepared()) == TURNED_AWAY
    assert STEP_RETRY.failure(Unprepared(in_doubt="perhaps")) == LOST
    assert STEP_RETRY.failure(Unprepared(in_doubt=None)) == TURNED_AWAY


def test_a_retryable_that_cannot_be_asked_is_in_doubt() -> None:
    assert STEP_RETRY.failure(Unwilling()) == LOST


# -------------------------------------------------------------------- how often


@pytest.mark.parametrize(
    ("policy", "tries", "elapsed", "allowed"),
    [
        (RetryPolicy(max_attempts=3), 1, 0, True),
        (RetryPolicy(max_attempts=3), 2, 10**9, True),
        (RetryPolicy(max_attempts=3), 3, 0, False),
        (RetryPolicy(max_attempts=3), 4, 0, False),
        (RetryPolicy(max_attempts=1), 1, 0, False),
        (RetryPolicy(max_attempts=None, max_elapsed=10 * SECOND), 10**6, 10, True),
        (RetryPolicy(max_attempts=None, max_elapsed=10 * SECOND), 1, 10.001, False),
        (RetryPolicy(max_attempts=3, max_elapsed=10 * SECOND), 3, 1, False),
        (RetryPolicy(max_attempts=3, max_elapsed=10 * SECOND), 2, 11, False),
        (RetryPolicy(max_attempts=3, max_elapsed=10 * SECOND), 2, 10, True),
    ],
)
def test_another_try_is_allowed_within_the_bounds(
    policy: RetryPolicy, tries: int, elapsed: float, allowed: bool
) -> None:
    assert policy.allows(tries, elapsed * SECOND) is allowed


# -------------------------------------------------------------------- after how long


def test_each_wait_is_twice_as_long_up_to_the_longest() -> None:
    policy = RetryPolicy(initial_wait=SECOND, max_wait=10 * SECOND, jitter=False)
    assert [policy.wait(tries) / SECOND for tries in range(1, 8)] == [1, 2, 4, 8, 10, 10, 10]


def test_without_a_first_wait_there_is_none() -> None:
    policy = RetryPolicy(initial_wait=timedelta(0), jitter=False)
    assert {policy.wait(tries) for tries in (1, 2, 10, 1_000)} == {timedelta(0)}


def test_the_longest_wait_bounds_the_first_one_too() -> None:
    assert RetryPolicy(initial_wait=60 * SECOND, max_wait=SECOND, jitter=False).wait(1) == SECOND


@given(st.integers(1, 100_000))
def test_no_number_of_tries_makes_a_wait_longer_than_the_longest(tries: int) -> None:
    assert timedelta(0) < RetryPolicy().wait(tries) <= timedelta(seconds=60)


@given(st.integers(1, 20))
def test_jitter_draws_between_half_and_all_of_the_wait(tries: int) -> None:
    whole = RetryPolicy(jitter=False).wait(tries)
    assert whole / 2 <= RetryPolicy().wait(tries) <= whole


def test_jitter_keeps_runs_that_failed_together_apart() -> None:
    assert len({RetryPolicy().wait(5) for _ in range(20)}) > 10


def test_no_wait_is_longer_than_a_calendar_can_take() -> None:
    assert RetryPolicy(initial_wait=timedelta.max, max_wait=timedelta.max, jitter=False).wait(99) == DURATION_MAX


def longest(policy: RetryPolicy) -> timedelta:
    """All waits together, at their longest."""
    assert policy.max_attempts is not None
    unjittered = [min(policy.initial_wait * 2**tries, policy.max_wait) for tries in range(policy.max_attempts - 1)]
    return sum(unjittered, timedelta(0))


def test_a_step_before_the_pivot_is_tried_five_times_within_some_seconds() -> None:
    assert STEP_RETRY.max_attempts == 5
    assert longest(STEP_RETRY) == 3 * SECOND


def test_a_compensation_is_tried_twelve_times_over_about_half_an_hour() -> None:
    assert COMPENSATION_RETRY.max_attempts == 12
    assert timedelta(minutes=15) <= longest(COMPENSATION_RETRY) <= timedelta(minutes=45)


def test_after_the_pivot_whatever_is_raised_is_tried_for_three_days() -> None:
    assert FORWARD_RETRY.failure(ValueError()).retryable
    assert FORWARD_RETRY.allows(10**6, timedelta(days=3))
    assert not FORWARD_RETRY.allows(1, timedelta(days=3, seconds=1))
    assert FORWARD_RETRY.wait(10**6) <= timedelta(minutes=5)


# -------------------------------------------------------------------- wrong policies


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_attempts": 0}, "RetryPolicy.max_attempts: must be at least 1"),
        ({"max_attempts": -3}, "RetryPolicy.max_attempts: must be at least 1"),
        (
            {"max_attempts": None},
            "RetryPolicy: needs max_attempts or max_elapsed: without a bound a run",
        ),
        ({"max_elapsed": -SECOND}, "RetryPolicy.max_elapsed: must not be negative"),
        ({"initial_wait": -SECOND}, "RetryPolicy.initial_wait: must not be negative"),
        ({"max_wait": -SECOND}, "RetryPolicy.max_wait: must not be negative"),
        ({"max_attempts": "5"}, "RetryPolicy.max_attempts"),
        ({"max_attempts": 2.5}, "RetryPolicy.max_attempts"),
        ({"initial_wait": "0.2"}, "RetryPolicy.initial_wait"),
        ({"max_wait": None}, "RetryPolicy.max_wait"),
        ({"max_attempts": None, "max_elapsed": "60"}, "RetryPolicy.max_elapsed"),
        ({"retry_on": Busy}, "RetryPolicy.retry_on"),
        ({"retry_on": ["Busy"]}, "RetryPolicy.retry_on"),
        ({"retry_on": (Busy(),)}, "RetryPolicy.retry_on"),
    ],
    ids=repr,
)
def test_a_wrong_policy_is_refused_when_it_is_made_and_names_the_option(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        RetryPolicy(**options)


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        STEP_RETRY.max_attempts = 6  # type: ignore[misc]


def test_policies_of_the_same_options_are_equal() -> None:
    assert RetryPolicy() == STEP_RETRY
    assert RetryPolicy(max_attempts=2) != STEP_RETRY
