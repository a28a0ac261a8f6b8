"""Everything that is left of what happened, for finding out whether a word is in it, in whatever form it might be.

Collections and index keys as the server has them, events of a change stream, entries of the oplog, log lines, and what
callers were told in exceptions.
"""

from __future__ import annotations

import base64
import logging
import re
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import bson
import pytest
import structlog

from sagas.errors import SagaError
from sagas_store.schema import SCHEMA

__all__ = ["Witness", "forms"]

_MARKER: Final = "marker"


def forms(word: str) -> list[bytes]:
    """The word as programs may write it: as it is, in UTF-16, in hex, in base64 at each of its three alignments."""
    raw = word.encode()
    found = [raw, word.encode("utf-16-le"), raw.hex().encode()]
    for before in range(3):
        coded = base64.b64encode(b"\0" * before + raw)
        found.append(coded[(4 * before + 2) // 3 + 1 : -4])
    return found


class Witness:
    """Sees one database from its making on, and one process's logs and exceptions."""

    def __init__(self, database: Any) -> None:
        self._database = database
        self._since: Any = None
        self.seen: defaultdict[str, list[bytes]] = defaultdict(list)

    async def begin(self) -> None:
        """From now on the change stream and the oplog are watched."""
        self._since = (await self._database.command("hello"))["operationTime"]

    async def look(self) -> None:
        """Look at every document and every index key as they are now; again whenever indexes have changed."""
        for name in await self._database.list_collection_names():
            async for batch in self._database[name].find_raw_batches({}):
                self.seen[f"documents of {name}"].append(batch)
        for spec in SCHEMA:
            collection = self._database[f"sagas.{spec.name}"]
            partial: dict[str, Any] = {index.name: index.partial or {} for index in spec.indexes}
            async for index in await collection.list_indexes():
                name = index["name"]
                chosen = partial.get(name, {})
                async for batch in collection.find_raw_batches(chosen, hint=name, return_key=True):
                    self.seen[f"keys of {name} on {spec.name}"].append(batch)

    async def end(self) -> None:
        """Read what the change stream and the oplog have of it."""
        await self._database[_MARKER].insert_one({"_id": _MARKER})
        async with await self._database.watch(
            full_document="updateLookup", start_at_operation_time=self._since
        ) as stream:
            async for event in stream:
                self.seen["change stream"].append(bson.encode(event))
                if event["ns"]["coll"] == _MARKER:
                    break
        oplog = self._database.client.local["oplog.rs"]
        async for batch in oplog.find_raw_batches({"ts": {"$gte": self._since}}):
            self.seen["oplog"].append(batch)
        await self._database[_MARKER].drop()

    async def told(self, call: Awaitable[object], kind: type[BaseException] = SagaError) -> None:
        """Await what must fail, and keep what its caller can see of the exception."""
        with pytest.raises(kind) as raised:
            await call
        self.keep_error(raised.value)

    def keep_error(self, error: BaseException) -> None:
        parts = [str(error), repr(error), *traceback.format_exception(error)]
        self.seen["exceptions"] += [part.encode() for part in parts]

    @contextmanager
    def hearing(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Keep every log line at debug level, of structlog and of the standard library, the driver's commands too."""
        monkeypatch.setenv("MONGOB_LOG_MAX_DOCUMENT_LENGTH", "1000000")
        caplog.set_level(logging.DEBUG)

        def keep(_: Any, __: str, event: Any) -> Any:
            self.seen["log"].append(event.encode())
            raise structlog.DropEvent

        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(default=repr),
                keep,
            ]
        )
        try:
            yield
        finally:
            structlog.reset_defaults()
            for record in caplog.records:
                where = "driver's log" if record.name.startswith("pymongo") else "log"
                self.seen[where].append(caplog.handler.format(record).encode())

    def where(self, word: str) -> set[str]:
        """The places in which the word is, in any form."""
        pattern = re.compile(b"|".join(map(re.escape, forms(word))))
        return {place for place, parts in self.seen.items() if any(pattern.search(part) for part in parts)}
