"""Where time and randomness come from. Everything else takes them as arguments."""

from __future__ import annotations

import secrets

from sagas_store.clock import Monotonic, ServerClock, monotonic

__all__ = ["Monotonic", "ServerClock", "monotonic", "new_token"]


def new_token() -> str:
    """128 random bits, as 32 hex digits: unique without asking anybody."""
    return secrets.token_hex(16)
