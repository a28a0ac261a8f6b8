"""Customers' keys: each has a master key of its own, in a file of its own, that can be lost and found again.

A `KeyWrapper` is all that a keyring asks for, so each customer could as well keep the key in a key service.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from sagas import KeyLost, Keyring, LocalKeyWrapper
from sagas.wrapping import KeyName, Wrapped, add_master_key

__all__ = ["KeyCabinet"]


class KeyCabinet:
    """Wraps each customer's data keys with that customer's master key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def issue(self, customers: Iterable[str]) -> None:
        """Make a master key for each of them."""
        self._folder.mkdir(mode=0o700)
        for customer in customers:
            add_master_key(self._file(customer), "only")

    def keyring(self, max_age: timedelta = timedelta(minutes=5)) -> Keyring:
        """A keyring of this process's own, which notices within `max_age` that a key is gone."""
        return Keyring(self, max_age=max_age)

    def lose(self, customer: str) -> None:
        """Put the customer's key where nobody finds it."""
        self._file(customer).rename(self._file(customer).with_suffix(".mislaid"))

    def find_again(self, customer: str) -> None:
        """Put it back."""
        self._file(customer).with_suffix(".mislaid").rename(self._file(customer))

    async def wrap(self, name: KeyName, key: bytes) -> Wrapped:
        """Wrap with the customer's master key. Raises KeyLost when it is not there."""
        return await self._master(name).wrap(name, key)

    async def unwrap(self, name: KeyName, wrapped: Wrapped) -> bytes:
        """Unwrap with the customer's master key. Raises KeyLost when it is not there, Tampered."""
        return await self._master(name).unwrap(name, wrapped)

    def _master(self, name: KeyName) -> LocalKeyWrapper:
        file = self._file(name.tenant or "")
        if not file.exists():
            raise KeyLost(name.tenant, name.key_id, "this customer's master key is not in the cabinet")
        return LocalKeyWrapper.from_file(file)

    def _file(self, customer: str) -> Path:
        return self._folder / f"{customer.encode().hex()}.key"  # a customer's name may hold anything
