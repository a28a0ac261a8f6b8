"""Master keys in Vault's Transit engine: the real client, against a small Vault of our own."""

from __future__ import annotations

import builtins
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sagas.errors import CannotOpen, InvalidInput, KeyDenied, KeyLost, KeyUnavailable, Tampered
from sagas.wrapping import KeyName, VaultTransitWrapper, Wrapped
from tests.sealing.wrapping import KEY, NAME, OTHER_NAMES
from tests.support.transit import Refused, TransitKey, Vault, vault


@pytest.fixture
def server() -> Iterator[Vault]:
    with vault() as running:
        running.keys["sagas"] = TransitKey()
        yield running


def wrapper(server: Vault, key: str = "sagas", **more: Any) -> VaultTransitWrapper:
    return VaultTransitWrapper.connect(key, url=server.url, token=server.token, **more)


async def test_a_wrapped_key_unwraps_under_its_name(server: Vault) -> None:
    wrapped = await wrapper(server).wrap(NAME, KEY)
    assert wrapped.master == "transit/sagas"
    assert wrapped.wrapped.startswith(b"vault:v1:")
    assert KEY not in wrapped.wrapped
    assert await wrapper(server).unwrap(NAME, wrapped) == KEY


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("other", OTHER_NAMES, ids=str)
async def test_under_another_name_it_does_not_unwrap(server: Vault, other: KeyName, derived: bool) -> None:
    server.keys["sagas"].derived = derived
    wrapped = await wrapper(server, derived=derived).wrap(NAME, KEY)
    assert await wrapper(server, derived=derived).unwrap(NAME, wrapped) == KEY
    with pytest.raises(Tampered):
        await wrapper(server, derived=derived).unwrap(other, wrapped)


async def test_after_a_rotation_in_vault_both_versions_unwrap(server: Vault) -> None:
    old = await wrapper(server).wrap(NAME, KEY)
    server.keys["sagas"].rotate()
    new = await wrapper(server).wrap(NAME, KEY)
    assert new.wrapped.startswith(b"vault:v2:")
    assert [await wrapper(server).unwrap(NAME, one) for one in (old, new)] == [KEY, KEY]
    server.keys["sagas"].min_decryption_version = 2
    with pytest.raises(KeyLost, match="below min_decryption_version"):
        await wrapper(server).unwrap(NAME, old)


async def test_older_master_keys_unwrap_and_only_those_that_are_trusted(server: Vault) -> None:
    server.keys["before"] = TransitKey()
    old = await wrapper(server, "before").wrap(NAME, KEY)
    assert await wrapper(server, older=["before"]).unwrap(NAME, old) == KEY
    server.asked.clear()
    with pytest.raises(KeyLost, match="'transit/before' is not among those given here"):
        await wrapper(server).unwrap(NAME, old)
    assert server.asked == []


async def test_an_engine_at_another_mount(server: Vault) -> None:
    server.mount = "team/transit"
    wrapped = await wrapper(server, mount="team/transit").wrap(NAME, KEY)
    assert wrapped.master == "team/transit/sagas"
    assert await wrapper(server, mount="team/transit").unwrap(NAME, wrapped) == KEY


ALTERED = [b"vault:v1:", b"vault:v1:AAAA", b"vault:v1:%%%", b"vault:v1", b"vault:vx:AAAA", b"garbage", b"\xff\xfe", b""]


@pytest.mark.parametrize("altered", ALTERED)
async def test_altered_bytes_are_told_from_a_lost_key(server: Vault, altered: bytes) -> None:
    with pytest.raises(Tampered):
        await wrapper(server).unwrap(NAME, Wrapped("transit/sagas", altered))


@pytest.mark.parametrize("status", [400, 500])
async def test_a_failed_authentication_is_one_whatever_the_status(server: Vault, status: int) -> None:
    server.authentication_failure_status = status
    wrapped = await wrapper(server).wrap(NAME, KEY)
    flipped = wrapped.wrapped[:-6] + (b"AA" if wrapped.wrapped[-6:-4] != b"AA" else b"BB") + wrapped.wrapped[-4:]
    with pytest.raises(Tampered, match="do not authenticate"):
        await wrapper(server).unwrap(NAME, Wrapped(wrapped.master, flipped))


ANSWERS: list[tuple[Refused, type[CannotOpen]]] = [
    (Refused(503, "Vault is sealed"), KeyUnavailable),
    (Refused(429, "rate limit quota exceeded"), KeyUnavailable),
    (Refused(473), KeyUnavailable),  # a standby for performance only
    (Refused(500, "internal error"), KeyUnavailable),
    (Refused(502), KeyUnavailable),
    (Refused(501, "Vault is not initialized"), KeyUnavailable),
    (Refused(403, "1 error occurred:\n\t* permission denied\n\n"), KeyDenied),
    (Refused(400, "missing client token"), KeyDenied),
    (Refused(400, "something new"), KeyDenied),
    (Refused(404), KeyDenied),
    (Refused(400, "invalid ciphertext: version is too new"), KeyLost),
]


@pytest.mark.parametrize(("answer", "error"), ANSWERS, ids=str)
async def test_what_vault_answers(server: Vault, answer: Refused, error: type[CannotOpen]) -> None:
    wrapped = await wrapper(server).wrap(NAME, KEY)
    server.trouble = answer
    with pytest.raises(CannotOpen) as unwrapping:
        await wrapper(server).unwrap(NAME, wrapped)
    with pytest.raises(CannotOpen) as wrapping:
        await wrapper(server).wrap(NAME, KEY)
    assert type(unwrapping.value) is type(wrapping.value) is error
    assert (unwrapping.value.tenant, unwrapping.value.key_id) == ("vinet", NAME.key_id)


async def test_a_wrong_token_is_a_refusal(server: Vault) -> None:
    with pytest.raises(KeyDenied, match="refuses us \\(Forbidden\\)"):
        await VaultTransitWrapper.connect("sagas", url=server.url, token="hvs.expired").wrap(NAME, KEY)


async def test_a_key_that_is_gone_is_lost(server: Vault) -> None:
    wrapped = await wrapper(server).wrap(NAME, KEY)
    del server.keys["sagas"]
    with pytest.raises(KeyLost, match="its master key does not exist"):
        await wrapper(server).unwrap(NAME, wrapped)


async def test_a_mount_that_is_not_there_is_lost(server: Vault) -> None:
    with pytest.raises(KeyLost, match="no Transit engine"):
        await wrapper(server, mount="elsewhere").wrap(NAME, KEY)


async def test_a_vault_that_is_away_is_unavailable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, and nobody listens
        with pytest.raises(KeyUnavailable, match="cannot be reached \\(ConnectionError\\)"):
            await VaultTransitWrapper.connect("sagas", url=url, token="x").wrap(NAME, KEY)


async def test_a_vault_that_says_nothing_is_unavailable(server: Vault) -> None:
    server.silent = threading.Event()
    with pytest.raises(KeyUnavailable, match="cannot be reached \\(ReadTimeout\\)"):
        await wrapper(server, timeout=0.1).wrap(NAME, KEY)


async def test_no_message_repeats_what_was_sent(server: Vault) -> None:
    server.trouble = Refused(400, f"cannot use {KEY!r}")
    with pytest.raises(KeyDenied) as refused:
        await wrapper(server).wrap(NAME, KEY)
    assert "canary" not in str(refused.value)
    assert refused.value.__suppress_context__


@pytest.mark.parametrize("name", ["", "/transit", "a/", " a"])
def test_a_name_that_is_no_plain_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="must be the plain name"):
        VaultTransitWrapper(None, name)


def test_without_hvac_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any) -> Any:
        if name == "hvac":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InvalidInput, match=r"pip install '.\[vault\]'"):
        VaultTransitWrapper.connect("sagas")


def test_it_shows_its_master_key_and_no_token(server: Vault) -> None:
    assert repr(wrapper(server)) == "VaultTransitWrapper('transit/sagas')"
