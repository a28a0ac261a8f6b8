"""Runs, journals and wrapped keys in MongoDB, under the saga executor.

Knows states and opaque bytes, never models, and never a key that it could open anything with.
"""

from __future__ import annotations

from sagas_store.store import MongoStore

__all__ = ["MongoStore"]
