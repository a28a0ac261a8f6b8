"""What the tests of wrappers and keyrings share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from sagas.wrapping import KeyName, LocalKeyWrapper, Wrapped

NAME = KeyName(tenant="vinet", key_id="0123456789abcdef", purpose="data")
OTHER_NAMES = [
    KeyName(tenant="hanar", key_id="0123456789abcdef", purpose="data"),
    KeyName(tenant=None, key_id="0123456789abcdef", purpose="data"),
    KeyName(tenant="vinet", key_id="0123456789abcdee", purpose="data"),
    KeyName(tenant="vinet", key_id="0123456789abcdef", purpose="lookup"),
]
KEY = b"canary, 32 bytes of a secret key"


class CountingWrapper:
    """A wrapper that counts its calls, and fails or hangs where it is told to."""

    def __init__(self) -> None:
        self.inner = LocalKeyWrapper({"test": bytes(32)})
        self.calls: Counter[str] = Counter()
        self.unwrapped: Counter[str] = Counter()
        self.failure: Callable[[KeyName], Exception] | None = None
        self.failing: Callable[[KeyName], Exception | None] | None = None
        """Like `failure`, for some of the keys, and for unwrapping alone."""
        self.release = asyncio.Event()
        self.release.set()

    async def wrap(self, name: KeyName, key: bytes) -> Wrapped:
        await self._meet("wrap", name)
        return await self.inner.wrap(name, key)

    async def unwrap(self, name: KeyName, wrapped: Wrapped) -> bytes:
        self.unwrapped[name.key_id] += 1
        await self._meet("unwrap", name)
        if self.failing is not None and (error := self.failing(name)) is not None:
            raise error
        return await self.inner.unwrap(name, wrapped)

    async def _meet(self, call: str, name: KeyName) -> None:
        self.calls[call] += 1
        await self.release.wait()
        if self.failure is not None:
            raise self.failure(name)
