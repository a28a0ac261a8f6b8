"""Sealed payloads: what the database holds of contexts, results, errors and reasons once there is a keyring.

A sealed payload is an envelope around a payload (`sagas.payload`), and binary:

    byte    0       1 .. 8     9 .. 20    21 ..        last 16
            0x02    key id     nonce      ciphertext   tag

AES-256-GCM, under a key that belongs to one run: derived with HKDF-SHA256 from the tenant's data key, so nonces of
different runs cannot collide. Nonces are random, because the same number of a run's journal can be sealed twice, by two
workers, with different contents, before one of them is fenced off: what follows from the place alone would repeat.
What the payload is, and where it belongs, is authenticated beside it: version, key id, tenant, run, slot, number. So a
payload that was altered, cut, moved to another place or put back from another run does not open.

Nothing is compressed: the size of a compressed payload tells whoever may choose a part of it about the rest (CRIME).

Everything here is pure but for the random nonce. How keys are come by: `sagas.keyring`. Layout and reasons:
docs/decisions/0011-sealed-format.md; the vectors that must open for ever: tests/golden/sealed-v2.json.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from enum import StrEnum
from typing import Final, Never, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sagas.clock import RandomBytes, random_bytes
from sagas.errors import KeyUnavailable, NoKeyring, Tampered, Unreadable
from sagas_store.entries import OF_ERRORS, Kind

__all__ = [
    "KEY_BYTES",
    "KEY_ID_BYTES",
    "SEALED_OVERHEAD_BYTES",
    "DataKey",
    "LookupKey",
    "Opener",
    "RunOpener",
    "RunSealer",
    "Sealer",
    "Slot",
    "Unsealed",
    "keys_needed",
    "place_of_newest_context",
    "place_of_payload",
    "place_of_reason",
]

KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 8

_SEALED: Final = b"\x02"
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_HEAD_BYTES: Final = 1 + KEY_ID_BYTES + _NONCE_BYTES

SEALED_OVERHEAD_BYTES: Final = _HEAD_BYTES + _TAG_BYTES
"""By how much a sealed payload is longer than the payload."""

_RUN_LABEL: Final = b"mongo-sagas sealed v2: key of one run"
_LOOKUP_LABEL: Final = b"mongo-sagas lookup v1: run of an idempotency key"
_RUN_ID_BYTES: Final = 16


class Slot(StrEnum):
    """What a payload is. Authenticated with it, so that one cannot be passed off as another."""

    INPUT = "input"
    """The context that a run was started with; number 0."""
    CONTEXT = "context"
    """A result: the context in an entry of the journal; the entry's number."""
    ERROR = "error"
    """What a step raised; the entry's number."""
    STOP = "stop"
    """Why a person pressed Stop; number 0. A run has at most one stop, so its reason is copied into the journal as it
    is sealed, and whoever acts on a stop needs no key for it."""
    REASON = "reason"
    """Why an operator moved the run on; the entry's number."""
    RESTART = "restart"
    """Why an operator started the run anew; number 0."""
    KEY = "key"
    """The idempotency key that a run was started with, for people to read; number 0."""


class _Secret:
    """A key: 32 bytes that never show in a repr and never leave the process."""

    __slots__ = ("_secret", "key_id", "tenant")

    def __init__(self, tenant: str | None, key_id: str, secret: bytes) -> None:
        self.tenant: Final = tenant
        self.key_id: Final = key_id
        self._secret = secret
        if len(secret) != KEY_BYTES or len(bytes.fromhex(key_id)) != KEY_ID_BYTES:
            raise ValueError(f"a key is {KEY_BYTES} bytes with an id of {KEY_ID_BYTES}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key_id})"

    def reveal(self) -> bytes:
        """The bytes, for a key wrapper."""
        return self._secret

    def __reduce__(self) -> Never:
        raise TypeError("keys stay in their process: they are neither pickled nor copied")


class DataKey(_Secret):
    """A tenant's data key, unwrapped. Nothing is sealed with it directly."""

    __slots__ = ()

    def for_run(self, run_id: str) -> AESGCM:
        """The cipher of one run: HKDF-SHA256 of this key, without a salt, bound to tenant and run."""
        info = _RUN_LABEL + _of_tenant(self.tenant) + _text(run_id)
        return AESGCM(HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(self._secret))


class LookupKey(_Secret):
    """A tenant's lookup key, unwrapped. It is never rotated: what it was used on must be found again."""

    __slots__ = ()

    def run_id(self, saga: str, key: str) -> str:
        """The id of the run of `saga` with this idempotency key, as 32 hex digits: HMAC-SHA256, cut to 128 bits.

        The same each time, so starts stay idempotent by the primary key; without the lookup key nobody can try out
        which idempotency key (an order number, an e-mail address) stands behind an id.
        """
        message = _LOOKUP_LABEL + _of_tenant(self.tenant) + _text(saga) + _text(key)
        return hmac.digest(self._secret, message, "sha256")[:_RUN_ID_BYTES].hex()


class Opener(Protocol):
    """Opens what is stored of one run."""

    def open(self, slot: Slot, seq: int, stored: bytes) -> bytes:
        """The payload. Raises Unreadable or CannotOpen."""


class Sealer(Opener, Protocol):
    """Opens, and seals what is to be stored, of one run. Both are quick, and ask nobody."""

    @property
    def key_id(self) -> str | None:
        """The key that it seals with; None where nothing is sealed."""

    @property
    def overhead_bytes(self) -> int:
        """By how much what is stored is longer than the payload."""

    def seal(self, slot: Slot, seq: int, payload: bytes) -> bytes:
        """What to store of the payload. Sealing the same again gives other bytes."""


def place_of_payload(kind: Kind, seq: int) -> tuple[Slot, int]:
    """Where the payload of a journal's entry belongs."""
    return (Slot.ERROR if kind in OF_ERRORS else Slot.CONTEXT), seq


def place_of_newest_context(seq: int | None) -> tuple[Slot, int]:
    """Where a run's newest context belongs: in the entry that carries it; in the input while no step has succeeded."""
    return (Slot.INPUT, 0) if seq is None else (Slot.CONTEXT, seq)


def place_of_reason(kind: Kind, seq: int) -> tuple[Slot, int]:
    """Where the reason in a journal's entry belongs: a stop's is a copy of that on the run."""
    return (Slot.STOP, 0) if kind in (Kind.ROLLBACK_BEGUN, Kind.STOP_REFUSED) else (Slot.REASON, seq)


def keys_needed(stored: Iterable[bytes | None]) -> set[str]:
    """The ids of the keys that these stored payloads are sealed with. What is not sealed needs none."""
    return {
        one[1 : 1 + KEY_ID_BYTES].hex()
        for one in stored
        if one is not None and one[:1] == _SEALED and len(one) >= SEALED_OVERHEAD_BYTES
    }


class RunOpener:
    """Opens the payloads of one run with the keys it is given. Strict: what is not sealed is refused.

    It keeps the keys of this run alone, never the tenant's.
    """

    def __init__(self, tenant: str | None, run_id: str, keys: Iterable[DataKey]) -> None:
        self.tenant: Final = tenant
        self.run_id: Final = run_id
        self._ciphers = {key.key_id: _cipher(tenant, run_id, key) for key in keys}

    def open(self, slot: Slot, seq: int, stored: bytes) -> bytes:
        """The payload that was sealed for exactly this place.

        Raises Unreadable when the bytes are no sealed payload at all, Tampered when they were altered or belong
        elsewhere, KeyUnavailable when their key is not among those at hand: ask the keyring again.
        """
        form = stored[:1]
        if form != _SEALED:
            raise Unreadable(_place(self.run_id, slot, seq), _why_not_sealed(form))
        key_id = stored[1 : 1 + KEY_ID_BYTES]
        if len(stored) < SEALED_OVERHEAD_BYTES:
            raise Tampered(self.tenant, None, f"{_place(self.run_id, slot, seq)} is cut short")
        if (cipher := self._ciphers.get(key_id.hex())) is None:
            raise KeyUnavailable(
                self.tenant, key_id.hex(), f"{_place(self.run_id, slot, seq)} needs this key, which was not fetched"
            )
        bound = _bound_to(key_id, self.tenant, self.run_id, slot, seq)
        try:
            return cipher.decrypt(stored[1 + KEY_ID_BYTES : _HEAD_BYTES], stored[_HEAD_BYTES:], bound)
        except InvalidTag:
            raise Tampered(
                self.tenant,
                key_id.hex(),
                f"{_place(self.run_id, slot, seq)} does not authenticate: its bytes were altered, or sealed for "
                "another place; the key itself is in order",
            ) from None


class RunSealer(RunOpener):
    """Seals with the newest key, and opens what older ones sealed. For one run, as long as somebody drives it."""

    def __init__(
        self,
        tenant: str | None,
        run_id: str,
        current: DataKey,
        older: Iterable[DataKey] = (),
        *,
        random_bytes: RandomBytes = random_bytes,
    ) -> None:
        super().__init__(tenant, run_id, [*older, current])
        self._key_id = current.key_id
        self._random_bytes = random_bytes

    @property
    def key_id(self) -> str:
        """The key that it seals with."""
        return self._key_id

    @property
    def overhead_bytes(self) -> int:
        """By how much what is stored is longer than the payload."""
        return SEALED_OVERHEAD_BYTES

    def seal(self, slot: Slot, seq: int, payload: bytes) -> bytes:
        """The payload sealed for this place, `SEALED_OVERHEAD_BYTES` longer."""
        key_id = bytes.fromhex(self.key_id)
        nonce = self._random_bytes(_NONCE_BYTES)
        bound = _bound_to(key_id, self.tenant, self.run_id, slot, seq)
        return b"".join((_SEALED, key_id, nonce, self._ciphers[self.key_id].encrypt(nonce, payload, bound)))


class Unsealed:
    """The twin for stores without a keyring: payloads are stored as they are. What is sealed is refused."""

    def __init__(self, tenant: str | None, run_id: str) -> None:
        self.tenant: Final = tenant
        self.run_id: Final = run_id

    @property
    def key_id(self) -> None:
        """No key."""
        return

    @property
    def overhead_bytes(self) -> int:
        """Nothing."""
        return 0

    def seal(self, slot: Slot, seq: int, payload: bytes) -> bytes:  # noqa: ARG002 - the interface of a sealer
        """The payload as it is."""
        return payload

    def open(self, slot: Slot, seq: int, stored: bytes) -> bytes:
        """The payload as it is. Raises NoKeyring when it is sealed."""
        if stored[:1] == _SEALED:
            key_id = stored[1 : 1 + KEY_ID_BYTES].hex() if len(stored) >= SEALED_OVERHEAD_BYTES else None
            raise NoKeyring(
                self.tenant, key_id, f"{_place(self.run_id, slot, seq)} is sealed, and this process has no keyring"
            )
        return stored


# ----------------------------------------------------------------------------------------------- what is bound, and how


def _cipher(tenant: str | None, run_id: str, key: DataKey) -> AESGCM:
    if key.tenant != tenant:
        raise ValueError(f"run {run_id} is of tenant {tenant!r}, key {key.key_id} of {key.tenant!r}")
    return key.for_run(run_id)


def _bound_to(key_id: bytes, tenant: str | None, run_id: str, slot: Slot, seq: int) -> bytes:
    # Fixed lengths first, then texts with theirs in front: no two places give the same bytes.
    return b"".join((_SEALED, key_id, seq.to_bytes(8, "big"), _of_tenant(tenant), _text(run_id), _text(slot)))


def _of_tenant(tenant: str | None) -> bytes:
    return b"\x00" if tenant is None else b"\x01" + _text(tenant)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(4, "big") + encoded


def _place(run_id: str, slot: Slot, seq: int) -> str:
    return f"run {run_id}, {slot}" + (f" of entry {seq}" if seq else "")


def _why_not_sealed(form: bytes) -> str:
    match form:
        case b"":
            return "is empty, where a sealed payload should be"
        case b"\x01":
            return "is not sealed, and with a keyring nothing else is accepted"
        case _:
            return f"unknown payload form {form.hex()}; written by a newer version?"
