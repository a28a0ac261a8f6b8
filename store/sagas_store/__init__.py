"""Runs and journals in MongoDB, under the saga executor. Knows states and opaque bytes, never models or keys."""

from __future__ import annotations

from sagas_store.store import MongoStore

__all__ = ["MongoStore"]
