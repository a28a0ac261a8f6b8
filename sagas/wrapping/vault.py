"""Data keys wrapped by a key of HashiCorp Vault's Transit engine (or OpenBao's), through hvac.

The key's name goes along as associated data, so the Transit key must be of an AEAD type (aes256-gcm96, the default, or
chacha20-poly1305), and the server Vault 1.13 or newer: an older one would not bind the name. With `derived=True` it is
also the context from which Vault derives the key it wraps with, for Transit keys that were made with `derived=true`.

The token needs `update` on `transit/encrypt/KEY` and `transit/decrypt/KEY`. Without `create` on the former a misspelt
key name is refused; with it Vault would make a key of that name.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Final, Never, Self

from sagas.errors import CannotOpen, InvalidInput, KeyDenied, KeyLost, KeyUnavailable, Tampered
from sagas.wrapping.wrapper import KeyName, Wrapped, checked_names
from sagas_store.inputs import check_flag, check_kind

__all__ = ["VaultTransitWrapper"]

# Vault tells these apart in words only, and answers them with 400 or, in some versions, with 500
# (hashicorp/vault issue 10842), so the words go before the status.
_LOST: Final = {
    "encryption key not found": "its master key does not exist",
    "disallowed by policy (too old)": "the version of its master key is below min_decryption_version",
    "version is too new": "the version of its master key does not exist",
    "no handler for route": "there is no Transit engine at that mount",
}
_ALTERED: Final = ("message authentication failed", "invalid ciphertext")


class VaultTransitWrapper:
    """Wraps with one key of a Transit engine; unwraps also what the keys before it have wrapped."""

    def __init__(
        self, client: Any, key: str, *, mount: str = "transit", older: Sequence[str] = (), derived: bool = False
    ) -> None:
        """`client` is hvac's, authenticated; the application renews its token. `key` and `older` are names of keys."""
        names = checked_names(key, older)
        check_kind("mount", mount, str, "'transit'")
        for name in (mount, *names):
            if not name or name != name.strip("/ "):
                raise InvalidInput("key", f"must be the plain name of a Transit key or mount, not {name!r}")
        self._client = client
        self._mount: Final = mount
        self._key: Final = key
        self._derived: Final = check_flag("derived", derived)
        self._trusted: Final = {f"{mount}/{name}": name for name in names}

    @classmethod
    def connect(
        cls,
        key: str,
        *,
        url: str | None = None,
        token: str | None = None,
        mount: str = "transit",
        older: Sequence[str] = (),
        derived: bool = False,
        **client: Any,
    ) -> Self:
        """With a client made here: address and token are VAULT_ADDR's and VAULT_TOKEN's unless given.

        It gives up after seconds; `client` goes to `hvac.Client` (verify, cert, namespace ...). Raises InvalidInput
        when hvac is not installed.
        """
        try:
            import hvac  # noqa: PLC0415 - an extra: only who uses it needs it
        except ImportError:
            raise InvalidInput("VaultTransitWrapper", "needs hvac: pip install '.[vault]' in the checkout") from None
        settings = {"url": url, "token": token, "timeout": 5, **client}
        return cls(hvac.Client(**settings), key, mount=mount, older=older, derived=derived)

    def __repr__(self) -> str:
        return f"VaultTransitWrapper({self._mount + '/' + self._key!r})"

    async def wrap(self, name: KeyName, key: bytes) -> Wrapped:
        """Wrap with the newest master key, in its newest version."""
        data = await self._call(name, "encrypt_data", self._key, plaintext=base64.b64encode(key).decode())
        return Wrapped(f"{self._mount}/{self._key}", str(data["ciphertext"]).encode())

    async def unwrap(self, name: KeyName, wrapped: Wrapped) -> bytes:
        """Unwrap with the master key that wrapped it, if it is one of ours."""
        if (key := self._trusted.get(wrapped.master)) is None:
            raise KeyLost(name.tenant, name.key_id, f"its master key {wrapped.master!r} is not among those given here")
        try:
            ciphertext = wrapped.wrapped.decode("ascii")
        except UnicodeDecodeError:
            raise Tampered(name.tenant, name.key_id, "its wrapped bytes are not Vault's: they were altered") from None
        data = await self._call(name, "decrypt_data", key, ciphertext=ciphertext)
        return base64.b64decode(data["plaintext"])

    async def _call(self, name: KeyName, operation: str, key: str, **arguments: str) -> dict[str, Any]:
        from hvac.exceptions import VaultError  # noqa: PLC0415 - as above
        from requests.exceptions import RequestException  # noqa: PLC0415

        bound = base64.b64encode(name.as_bytes()).decode()
        arguments |= {"associated_data": bound, **({"context": bound} if self._derived else {})}
        ask = getattr(self._client.secrets.transit, operation)
        try:
            answer = await asyncio.to_thread(ask, name=key, mount_point=self._mount, **arguments)
        except VaultError as error:
            self._refused(name, error)
        except RequestException as error:  # no connection, no answer in time
            raise KeyUnavailable(
                name.tenant, name.key_id, f"Vault cannot be reached ({type(error).__name__})"
            ) from None
        data: dict[str, Any] = answer["data"]
        return data

    @staticmethod
    def _refused(name: KeyName, refusal: Any) -> Never:
        """Raise what Vault's answer means. Its text is looked at and never passed on."""
        words = " ".join(map(str, refusal.errors or [])).lower()
        kind = type(refusal).__name__
        error: CannotOpen
        if lost := next((meaning for phrase, meaning in _LOST.items() if phrase in words), None):
            error = KeyLost(name.tenant, name.key_id, f"{lost} (Vault)")
        elif any(phrase in words for phrase in _ALTERED):
            error = Tampered(
                name.tenant, name.key_id, "its wrapped bytes do not authenticate under this name and master key (Vault)"
            )
        elif kind in ("Forbidden", "Unauthorized", "InvalidRequest", "InvalidPath", "UnsupportedOperation"):
            # An expired token, a missing policy; and whatever else it refuses us for.
            error = KeyDenied(name.tenant, name.key_id, f"Vault refuses us ({kind})")
        else:  # throttled, sealed, standing by, failing
            error = KeyUnavailable(name.tenant, name.key_id, f"Vault says: not now ({kind})")
        raise error from None
