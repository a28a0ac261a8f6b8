"""Key material is in no message, repr or log, whatever form it might take there."""

from __future__ import annotations

import asyncio
import base64
import logging
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog

from sagas.clock import random_bytes
from sagas.errors import CannotOpen, InvalidInput, KeyDenied, KeyLost, KeyUnavailable, SagaError, Tampered
from sagas.keyring import ClaimRound, Keyring
from sagas.sealing import RunOpener, Slot
from sagas.wrapping import KeyName, LocalKeyWrapper, Wrapped, add_master_key
from sagas_store import MongoStore
from tests.sealing.deployment import WHY

CANARY = b"canary, 32 bytes of a secret key"
MASTER = b"canary, 32 bytes of a master key"
CARD = b"4111-1111-1111-1111"
RUN = "0123456789abcdef0123456789abcdef"


def shows(text: str) -> bool:
    """Whether a secret is in the text, in any of the forms that programs print bytes in."""
    forms = [form for secret in (CANARY, MASTER, CARD) for form in (secret.decode(), secret.hex(), repr(secret))]
    forms += [base64.b64encode(secret).decode()[:-4] for secret in (CANARY, MASTER)]
    forms += [", ".join(map(str, CANARY[:8]))]
    return any(form in text for form in forms)


def test_the_test_sees_what_it_looks_for() -> None:
    for text in (str(CANARY), MASTER.hex(), base64.b64encode(CANARY).decode(), str(list(CANARY)), str(CARD)):
        assert shows(text)


class Failing(LocalKeyWrapper):
    """Has the secret in its hands when it fails."""

    failure: Callable[[KeyName], Exception] | None = None

    async def wrap(self, name: KeyName, key: bytes) -> Wrapped:
        if self.failure is not None:
            raise self.failure(name)
        return await super().wrap(name, key)

    async def unwrap(self, name: KeyName, wrapped: Wrapped) -> bytes:
        secret = await super().unwrap(name, wrapped)
        if self.failure is not None:
            raise self.failure(name)
        assert secret
        return secret


FAILURES: dict[str, Callable[[KeyName], Exception]] = {
    "unavailable": lambda name: KeyUnavailable(name.tenant, name.key_id, "away"),
    "denied": lambda name: KeyDenied(name.tenant, name.key_id, "no"),
    "lost": lambda name: KeyLost(name.tenant, name.key_id, "gone"),
    "tampered": lambda name: Tampered(name.tenant, name.key_id, "altered"),
    "a bug that quotes the secret": lambda _: ValueError(f"cannot use {CANARY!r} {MASTER!r}"),
    "a time-out that quotes the secret": lambda _: TimeoutError(f"cannot use {CANARY!r} {MASTER!r}"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_no_failure_shows_a_secret(
    store: MongoStore, failure: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrapper = Failing({"2026": MASTER})
    times = iter(range(0, 10**9, 100))

    def ring() -> Keyring:
        keyring = Keyring(
            wrapper,
            max_age=timedelta(seconds=1),
            monotonic=lambda: next(times),
            random_bytes=lambda count: CANARY if count == 32 else random_bytes(count),
        )
        keyring.bind(store.keys)
        return keyring

    keyring = ring()
    stored = (await keyring.sealer("vinet", RUN)).seal(Slot.INPUT, 0, b"\x01" + CARD)
    sealer = await keyring.sealer("vinet", RUN, [stored])
    lookup = await keyring.lookup_key("vinet")
    said = [repr(thing) for thing in (keyring, wrapper, sealer, lookup, await keyring.current("vinet"), ClaimRound())]
    said += [repr(vars(keyring)), repr(keyring._known), repr(await keyring.keys("vinet")), repr(vars(sealer))]

    wrapper.failure = FAILURES[failure]
    calls: list[Callable[[], Any]] = [
        lambda: ring().sealer("vinet", RUN, [stored]),
        lambda: ring().opener("vinet", RUN, [stored]),
        lambda: ring().lookup_key("vinet"),
        lambda: ring().current("hanar"),
        lambda: ring().create("hanar"),
        lambda: ring().rotate("vinet", **WHY),
        lambda: keyring.sealer("vinet", RUN, [stored], claim_round=ClaimRound()),
    ]
    for call in calls:
        told = await asyncio.gather(call(), call(), return_exceptions=True)
        for error in told:
            assert isinstance(error, CannotOpen), error
            said += [str(error), repr(error), repr(vars(error)), *traceback.format_exception(error)]
            # As the loggers do that print the variables of every frame: structlog with rich, Sentry and others.
            said += traceback.TracebackException.from_exception(error, capture_locals=True).format()
            structlog.get_logger().error("does not open", exc_info=error)
            logging.getLogger("test").error("does not open", exc_info=error)
    said += [repr(await keyring.rewrap_keys())]
    out, err = capfd.readouterr()
    said += [out, err, caplog.text]
    assert [one for one in said if shows(one)] == []


@pytest.mark.parametrize("stored", [CARD, b"\x01" + CARD, b"\x02" + CARD, b"\x02" + CARD * 20, b"\x03" + CARD])
def test_no_refused_payload_shows_itself(stored: bytes) -> None:
    with pytest.raises(SagaError) as refused:
        RunOpener("vinet", RUN, []).open(Slot.INPUT, 0, stored)
    error = refused.value
    assert not shows(f"{error} {error!r} {vars(error)}")


@pytest.mark.parametrize("damage", ["\n2027:", "\n2027:###", "\n2026:", "oops"])
def test_no_refused_key_file_shows_a_key_not_even_in_a_frame(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text(f"2026:{base64.b64encode(MASTER).decode()}{damage}")
    loads: list[Callable[[], object]] = [
        lambda: LocalKeyWrapper.from_file(path),
        lambda: add_master_key(path, "2028", random_bytes=lambda _: CANARY),
        lambda: LocalKeyWrapper({"2026": MASTER, "2027": MASTER[:8]}),
    ]
    for load in loads:
        with pytest.raises(InvalidInput) as refused:
            load()
        said = traceback.TracebackException.from_exception(refused.value, capture_locals=True)
        said.stack = traceback.StackSummary.from_list([frame for frame in said.stack if "tests" not in frame.filename])
        assert len(said.stack) > 0
        assert not shows("".join(said.format()))
