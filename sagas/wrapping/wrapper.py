"""The seam to master keys: two questions, and how their failures are told apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sagas_store.inputs import check_kind, check_several

__all__ = ["KeyName", "KeyWrapper", "Wrapped", "checked_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyName:
    """Which key is wrapped. Authenticated with it: wrapped bytes moved to another key's record do not open there."""

    tenant: str | None
    key_id: str
    purpose: str

    def as_context(self) -> dict[str, str]:
        """The name as plain words, for services that take an encryption context and show it in their audit log."""
        context = {"application": "mongo-sagas", "key_id": self.key_id, "purpose": self.purpose}
        return context if self.tenant is None else {**context, "tenant": self.tenant}

    def as_bytes(self) -> bytes:
        """The name as bytes that no other name has: its context as JSON, ASCII, names in order, without blanks."""
        return json.dumps(self.as_context(), sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A wrapped key, and the master key that wrapped it."""

    master: str
    """Its name, not a secret: operators see it, to know which master keys are still needed."""
    wrapped: bytes = field(repr=False)


def checked_names(key: str, older: Sequence[str]) -> tuple[str, ...]:
    """The names of a service's master keys, the newest first. Raises InvalidInput unless they are texts."""
    check_kind("key", key, str, "the name of a master key")
    several = check_several("older", older, "names", "[name]")
    return (key, *(check_kind("older", name, str, "the name of a master key") for name in several))


class KeyWrapper(Protocol):
    """Wraps keys and unwraps them.

    Both methods raise, with the name's tenant and key id, and never with a byte of a key in the message:
    KeyUnavailable when the service did not answer or says "not now", KeyDenied when it refuses this process, KeyLost
    when the master key is gone, disabled or not one of ours, Tampered when the wrapped bytes do not authenticate.
    Whatever else they raise is taken for KeyUnavailable, since nothing can be concluded from it. Waiting is bounded by
    the keyring, but a wrapper should give up by itself. Both may be called again at any time.
    """

    async def wrap(self, name: KeyName, key: bytes) -> Wrapped:
        """Wrap a key with the newest master key."""
        ...

    async def unwrap(self, name: KeyName, wrapped: Wrapped) -> bytes:
        """The key again, whichever of its master keys wrapped it.

        A master key that this wrapper was not configured with is refused (KeyLost), even if it could be used: what
        names it stands in the database, and whoever can write there must not choose the key that we seal with.
        """
        ...
