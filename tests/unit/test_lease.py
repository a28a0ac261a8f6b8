"""A lease as its holder sees it: shorter than the server's, by this process's own clock."""

from datetime import timedelta

import pytest

from sagas.errors import SagaError
from sagas.lease import Lease, LeaseLapsed


class Clock:
    """A monotonic clock that a test turns."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> Lease:
    """A minute, asked for just now: 54 seconds of it are used."""
    return Lease("run-1", "token-1", timedelta(minutes=1), asked_at=clock.at, monotonic=clock)


def test_a_lease_holds_until_a_tenth_before_its_end(clock: Clock, lease: Lease) -> None:
    clock.at += 53.999
    assert lease.holds
    lease.check()


@pytest.mark.parametrize("later", [54, 60, 10**6])
def test_then_it_is_over_for_its_holder(clock: Clock, lease: Lease, later: float) -> None:
    clock.at += later
    assert not lease.holds
    with pytest.raises(LeaseLapsed, match="run run-1: its lease may be over; another worker may drive it") as lapsed:
        lease.check()
    assert lapsed.value.run_id == "run-1"


def test_it_counts_from_when_the_claim_was_sent_not_from_when_its_reply_arrived(clock: Clock) -> None:
    asked_at = clock.at
    clock.at += 50
    lease = Lease("run-1", "token-1", timedelta(minutes=1), asked_at=asked_at, monotonic=clock)
    assert lease.holds
    clock.at = asked_at + 54
    assert not lease.holds


def test_a_claim_whose_reply_took_longer_than_the_lease_holds_nothing(clock: Clock) -> None:
    lease = Lease("run-1", "token-1", timedelta(minutes=1), asked_at=clock.at - 54, monotonic=clock)
    assert not lease.holds


def test_a_renewal_counts_from_when_it_was_sent(clock: Clock, lease: Lease) -> None:
    clock.at += 20
    asked_at = clock.at
    clock.at += 10
    lease.renewed(asked_at)
    clock.at = asked_at + 53.999
    assert lease.holds
    clock.at = asked_at + 54
    assert not lease.holds


def test_a_renewal_whose_reply_is_late_does_not_shorten_a_newer_one(clock: Clock, lease: Lease) -> None:
    sent = clock.at
    lease.renewed(sent + 30)
    lease.renewed(sent + 10)
    clock.at = sent + 30 + 53.999
    assert lease.holds


def test_a_renewal_that_got_through_revives_a_lease_that_was_thought_over(clock: Clock, lease: Lease) -> None:
    clock.at += 55
    lease.renewed(clock.at - 10)
    assert lease.holds


def test_a_lost_lease_is_over_at_once(lease: Lease) -> None:
    lease.lose()
    assert not lease.holds
    with pytest.raises(LeaseLapsed):
        lease.check()


def test_a_renewal_sent_before_the_loss_was_known_does_not_bring_it_back(clock: Clock, lease: Lease) -> None:
    lease.lose()
    lease.renewed(clock.at)
    assert not lease.holds


def test_a_lapsed_lease_is_an_error_of_this_project() -> None:
    assert issubclass(LeaseLapsed, SagaError)


def test_it_knows_what_it_is_for(lease: Lease) -> None:
    assert (lease.run_id, lease.token) == ("run-1", "token-1")
