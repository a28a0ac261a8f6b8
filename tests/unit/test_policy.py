"""When a step is tried again: what an exception means, how often, and after how long."""

import importlib
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any

import aiohttp
import botocore.exceptions
import httpx
import pytest
import redis
import requests
import stripe
import urllib3
from hypothesis import given
from hypothesis import strategies as st
from pymongo import errors as mongo

from sagas.errors import NonRetryable, Retryable
from sagas.policy import _LOST_REPLIES, COMPENSATION_RETRY, FORWARD_RETRY, STEP_RETRY, Failure, RetryPolicy

SECOND = timedelta(seconds=1)


class Busy(Exception):
    """Something of the application's own."""


class VeryBusy(Busy):
    pass


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


@pytest.mark.parametrize("error", [Busy(), VeryBusy()], ids=repr)
def test_what_the_definition_adds_is_retried_and_leaves_doubt(error: Exception) -> None:
    assert RetryPolicy(retry_on=(KeyError, Busy)).failure(error) == LOST


def test_what_the_definition_does_not_add_stays_definite() -> None:
    assert RetryPolicy(retry_on=(VeryBusy,)).failure(Busy()) == DEFINITE


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
        ({"max_attempts": 0}, "RetryPolicy.max_attempts must be at least 1, not 0"),
        ({"max_attempts": -3}, "RetryPolicy.max_attempts must be at least 1, not -3"),
        ({"max_attempts": None}, "needs max_attempts or max_elapsed: without a bound a run never comes to rest"),
        ({"max_elapsed": -SECOND}, "RetryPolicy.max_elapsed must not be negative"),
        ({"initial_wait": -SECOND}, "RetryPolicy.initial_wait must not be negative"),
        ({"max_wait": -SECOND}, "RetryPolicy.max_wait must not be negative"),
        ({"max_attempts": "5"}, "RetryPolicy.max_attempts"),
        ({"max_attempts": 2.5}, "RetryPolicy.max_attempts"),
        ({"initial_wait": 0.2}, "RetryPolicy.initial_wait"),
        ({"max_wait": 60}, "RetryPolicy.max_wait"),
        ({"max_attempts": None, "max_elapsed": 60}, "RetryPolicy.max_elapsed"),
        ({"retry_on": Busy}, "RetryPolicy.retry_on"),
        ({"retry_on": ["Busy"]}, "RetryPolicy.retry_on"),
        ({"retry_on": (Busy(),)}, "RetryPolicy.retry_on"),
    ],
    ids=repr,
)
def test_a_wrong_policy_is_refused_when_it_is_made_and_names_the_option(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        RetryPolicy(**options)


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        STEP_RETRY.max_attempts = 6  # type: ignore[misc]


def test_policies_of_the_same_options_are_equal() -> None:
    assert RetryPolicy() == STEP_RETRY
    assert RetryPolicy(max_attempts=2) != STEP_RETRY
