"""The sealed format once more, written from docs/decisions/0011-sealed-format.md and not from the code.

    python -m tests.sealing.vectors     write tests/golden/sealed-v2.json anew: only while nobody uses the format yet

HKDF and HMAC are spelt out on hashlib. AES-GCM is the library's: its own vectors vouch for it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

GOLDEN = Path(__file__).parents[1] / "golden" / "sealed-v2.json"

KEYS = {
    "0001020304050607": bytes(range(32)),
    "a0a1a2a3a4a5a6a7": bytes(range(0x80, 0xA0)),
}
LOOKUP_KEY = bytes(range(0x40, 0x60))
RUN = "0123456789abcdef0123456789abcdef"


def hkdf_sha256(secret: bytes, info: bytes) -> bytes:
    """RFC 5869 with an empty salt and 32 bytes of output, which is one round of expansion."""
    pseudorandom = hmac.digest(bytes(32), secret, "sha256")
    return hmac.new(pseudorandom, info + b"\x01", hashlib.sha256).digest()


def text(value: str) -> bytes:
    raw = value.encode("utf-8")
    return len(raw).to_bytes(4, "big") + raw


def of_tenant(tenant: str | None) -> bytes:
    return b"\x00" if tenant is None else b"\x01" + text(tenant)


def run_key(secret: bytes, tenant: str | None, run_id: str) -> bytes:
    return hkdf_sha256(secret, b"mongo-sagas sealed v2: key of one run" + of_tenant(tenant) + text(run_id))


def associated(key_id: str, tenant: str | None, run_id: str, slot: str, seq: int) -> bytes:
    head = b"\x02" + bytes.fromhex(key_id) + seq.to_bytes(8, "big")
    return head + of_tenant(tenant) + text(run_id) + text(slot)


def sealed(place: dict[str, Any], key_id: str, nonce: bytes, payload: bytes) -> dict[str, Any]:
    where = (place["tenant"], place["run_id"])
    key = run_key(KEYS[key_id], *where)
    bound = associated(key_id, *where, place["slot"], place["seq"])
    stored = b"\x02" + bytes.fromhex(key_id) + nonce + AESGCM(key).encrypt(nonce, payload, bound)
    return {
        **place,
        "key_id": key_id,
        "nonce": nonce.hex(),
        "payload": payload.hex(),
        "run_key": key.hex(),
        "associated_data": bound.hex(),
        "stored": stored.hex(),
    }


def run_id_of(tenant: str | None, saga: str, key: str) -> str:
    message = b"mongo-sagas lookup v1: run of an idempotency key" + of_tenant(tenant) + text(saga) + text(key)
    return hmac.digest(LOOKUP_KEY, message, "sha256")[:16].hex()


def place(slot: str, seq: int, tenant: str | None = "vinet", run_id: str = RUN) -> dict[str, Any]:
    return {"tenant": tenant, "run_id": run_id, "slot": slot, "seq": seq}


def golden() -> dict[str, Any]:
    first, second = KEYS
    order = b'\x01{"order_id":10248,"customer":"VINET"}'
    nonce = bytes(range(0xB0, 0xBC))
    valid = {
        "the input of a run": sealed(place("input", 0), first, nonce, order),
        "a result in the journal": sealed(place("context", 7), first, nonce, order),
        "the newer of two keys": sealed(place("context", 8), second, nonce, order),
        "an error": sealed(
            place("error", 3), first, bytes(12), b'\x01{"type":"ValueError","message":"","traceback":""}'
        ),
        "a stop's reason": sealed(place("stop", 0), first, nonce, b'\x01"changed their mind"'),
        "an operator's reason": sealed(place("reason", 4), first, nonce, b'\x01"stock is back"'),
        "the reason of a restart": sealed(place("restart", 0), first, nonce, b'\x01"address corrected"'),
        "an idempotency key": sealed(place("key", 0), first, nonce, b"\x01order-10248"),
        "a run without a tenant": sealed(place("input", 0, tenant=None), first, nonce, order),
        "a tenant beyond ASCII": sealed(place("input", 0, tenant="Königlich Essen"), first, nonce, order),
        "an empty payload": sealed(place("context", 1), first, nonce, b""),
        "the largest number": sealed(place("context", 2**63 - 1), first, b"\xff" * 12, b"\x01null"),
    }
    good = valid["a result in the journal"]
    stored = bytes.fromhex(good["stored"])
    at = {name: good[name] for name in ("tenant", "run_id", "slot", "seq")}

    def flipped(position: int) -> bytes:
        return stored[:position] + bytes([stored[position] ^ 1]) + stored[position + 1 :]

    def wrong(error: str, stored: bytes, **elsewhere: Any) -> dict[str, Any]:
        return {**at, **elsewhere, "stored": stored.hex(), "error": error}

    invalid = {
        "nothing": wrong("Unreadable", b""),
        "a payload that is not sealed": wrong("Unreadable", order),
        "a version that is not known": wrong("Unreadable", b"\x03" + stored[1:]),
        "one bit of the version": wrong("Unreadable", flipped(0)),
        "one bit of the key id: a key that is not at hand": wrong("KeyUnavailable", flipped(1)),
        "the id of another key of the tenant": wrong("Tampered", stored[:1] + bytes.fromhex(second) + stored[9:]),
        "one bit of the nonce": wrong("Tampered", flipped(9)),
        "one bit of the ciphertext": wrong("Tampered", flipped(21)),
        "one bit of the tag": wrong("Tampered", flipped(len(stored) - 1)),
        "the last byte missing": wrong("Tampered", stored[:-1]),
        "a byte too many": wrong("Tampered", stored + b"\x00"),
        "a byte less than head and tag": wrong("Tampered", stored[:36]),
        "the version alone": wrong("Tampered", stored[:1]),
        "another run": wrong("Tampered", stored, run_id=RUN[::-1]),
        "another slot": wrong("Tampered", stored, slot="error"),
        "another number": wrong("Tampered", stored, seq=8),
        "another tenant": wrong("Tampered", stored, tenant="hanar"),
        "no tenant": wrong("Tampered", stored, tenant=None),
        "a tenant and run that read alike when joined": wrong("Tampered", stored, tenant="vinet0", run_id=RUN[1:]),
    }
    lookups = [
        {"tenant": tenant, "saga": saga, "key": key, "run_id": run_id_of(tenant, saga, key)}
        for tenant, saga, key in [
            ("vinet", "fulfil-order", "order-10248"),
            ("hanar", "fulfil-order", "order-10248"),
            (None, "fulfil-order", "order-10248"),
            ("vinet", "fulfil", "-orderorder-10248"),
        ]
    ]
    return {
        "about": "docs/decisions/0011-sealed-format.md; bytes in hex; `error` is the exception of `open` at that place",
        "data_keys": {key_id: secret.hex() for key_id, secret in KEYS.items()},
        "lookup_key": LOOKUP_KEY.hex(),
        "valid": valid,
        "invalid": invalid,
        "lookups": lookups,
    }


def rendered() -> str:
    return json.dumps(golden(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(rendered())
