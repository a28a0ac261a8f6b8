"""A worker process of the example, as the command line starts it:

    python -m sagas worker order_fulfilment.worker:make_worker

Everything is set by the environment; see `Settings`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from pymongo import AsyncMongoClient

from sagas import MongoStore, Worker, WorkerOptions

from .keys import KeyCabinet
from .network import Outages
from .saga import fulfil_order
from .shop import Shop

__all__ = ["Settings", "make_worker", "shop_database"]


class Settings(BaseModel):
    """What the environment says, under the names in capitals."""

    uri: str = Field("mongodb://localhost:27017/?replicaSet=rs0", alias="SAGAS_MONGODB_URI")
    database: str = Field("sagas", alias="SAGAS_DATABASE")
    name: str | None = Field(None, alias="ORDER_WORKER_NAME")
    concurrency: int = Field(16, alias="ORDER_WORKER_CONCURRENCY", ge=1)
    lease_s: float = Field(30, alias="ORDER_WORKER_LEASE_S", gt=0)
    outage_percent: int = Field(0, alias="ORDER_OUTAGE_PERCENT", ge=0, le=100)
    outage_seed: int = Field(0, alias="ORDER_OUTAGE_SEED")
    delay_ms: float = Field(0, alias="ORDER_DELAY_MS", ge=0)
    """How long a request to a participant is under way at most, and its answer again."""
    keys: Path | None = Field(None, alias="ORDER_KEYS")
    """The folder with the customers' master keys; with it, everything is sealed."""
    key_max_age_s: float = Field(300, alias="ORDER_KEY_MAX_AGE_S", gt=0)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """The settings in this environment. Raises pydantic's ValidationError, naming the variable."""
        return cls.model_validate(dict(environment))


def shop_database(database: str) -> str:
    """Where the participants keep their ledgers: not in the engine's database."""
    return f"{database}_shop"


def make_worker() -> Worker:
    """The worker that the environment describes."""
    settings = Settings.of(os.environ)
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(settings.uri)
    name = settings.name or f"process {os.getpid()}"
    shop = Shop.on(
        client[shop_database(settings.database)],
        caller=name,
        outages=Outages(seed=settings.outage_seed, percent=settings.outage_percent),
        delay=timedelta(milliseconds=settings.delay_ms),
    )
    keyring = None
    if settings.keys is not None:
        keyring = KeyCabinet(settings.keys).keyring(timedelta(seconds=settings.key_max_age_s))
    return Worker(
        MongoStore(client[settings.database], keyring=keyring),
        [fulfil_order],
        resources=shop,
        name=name,
        options=WorkerOptions(concurrency=settings.concurrency, lease=timedelta(seconds=settings.lease_s)),
    )
