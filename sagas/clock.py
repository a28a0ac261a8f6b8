"""Where time and randomness come from. Everything else takes them as arguments."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from sagas_store.clock import Monotonic, ServerClock, monotonic, new_token

__all__ = ["Monotonic", "RandomBytes", "ServerClock", "monotonic", "new_token", "random_bytes"]

RandomBytes = Callable[[int], bytes]
"""So many random bytes, fit for keys and nonces."""


def random_bytes(count: int) -> bytes:
    """So many random bytes of the operating system: what keys and nonces are made of."""
    return secrets.token_bytes(count)
