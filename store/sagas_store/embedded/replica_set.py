"""Making one replica set of running nodes, whatever their folders hold, and knowing when it serves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from pymongo.errors import OperationFailure, PyMongoError

from sagas_store.embedded.errors import FolderUnusable, NoPrimary
from sagas_store.embedded.node import POLL_SECONDS, Node

ELECTION_TIMEOUT_MS: Final = 2000
"""How long a set of several nodes misses its primary before it elects another; the server's default is 10 s."""

# Nodes learn of each other by heartbeat: at the server's 2 s the first majority write took 1.5 s, at 0.5 s 0.4 s.
_HEARTBEAT_MS: Final = 500

# https://github.com/mongodb/mongo/blob/master/src/mongo/base/error_codes.yml
_NOT_YET_INITIALIZED: Final = 94


def stored_configuration(nodes: Sequence[Node]) -> tuple[Node, dict[str, Any]] | None:
    """Return the newest configuration that the nodes' data holds and the node that has it; None when all are blank.

    Read from the collection, not by replSetGetConfig: while a node is still loading the configuration it has, that one
    answers as if there were none, and so may replSetInitiate be tried on data that is somebody's.
    """
    found: list[tuple[Node, dict[str, Any]]] = []
    for node in nodes:
        reply = node.ask({"find": "system.replset", "limit": 1}, database="local")
        found += [(node, configuration) for configuration in reply["cursor"]["firstBatch"]]
    return max(found, key=lambda pair: (pair[1].get("term", 0), pair[1]["version"]), default=None)


def form_replica_set(nodes: Sequence[Node], *, name: str, folder: Path, deadline: float) -> None:
    """Initiate the set, or take up the stored one, its hosts corrected to the nodes' ports.

    The correction is a forced reconfiguration: with other ports no member finds itself in the stored one, so there is
    no primary to ask. Forcing can lose acknowledged writes where members disagree; here all members are ours and
    start together, so a majority still has each of them.
    """
    stored = stored_configuration(nodes)
    if stored is None:
        nodes[0].ask({"replSetInitiate": _new_configuration(nodes, name=name)})
        return
    holder, configuration = stored
    corrected = _corrected(configuration, nodes, folder=folder)
    if corrected == configuration:
        return
    while True:
        try:
            holder.ask({"replSetReconfig": corrected, "force": True})
        except OperationFailure as error:
            # It still looks for itself in the old configuration, by asking whoever has its old port now. Usually that
            # takes no time; if they listen and never answer, mongod waits 30 s for them.
            if error.code != _NOT_YET_INITIALIZED or time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return


def _new_configuration(nodes: Sequence[Node], *, name: str) -> dict[str, Any]:
    return {
        "_id": name,
        "members": [{"_id": number, "host": node.host} for number, node in enumerate(nodes)],
        "settings": {"electionTimeoutMillis": ELECTION_TIMEOUT_MS, "heartbeatIntervalMillis": _HEARTBEAT_MS},
    }


def _corrected(configuration: dict[str, Any], nodes: Sequence[Node], *, folder: Path) -> dict[str, Any]:
    """The configuration with the nodes' hosts, or as it is when it has them already."""
    members = configuration["members"]
    if len(members) != len(nodes):
        reason = f"it holds a member of the replica set {configuration['_id']}, which has {len(members)} members"
        raise FolderUnusable(folder, f"{reason}, and nodes={len(nodes)} was asked for")
    if [member["host"] for member in members] == [node.host for node in nodes]:
        return configuration
    corrected = {
        **configuration,
        "version": configuration["version"] + 1,
        "members": [{**member, "host": node.host} for member, node in zip(members, nodes, strict=True)],
    }
    corrected.pop("term", None)  # the server's to set
    return corrected


def wait_until_in_service(nodes: Sequence[Node], *, deadline: float, timeout: float) -> None:
    """Return when one node is primary and all others are secondaries, so that any one of them may now be killed.

    Left alone, nodes that come up together wait out an election timeout before one of them stands. Asked to stand, one
    does at once; it may lose while the others are not up yet or when it is behind them, so they are asked in turn.
    """
    turns = count()
    elected = len(nodes) == 1  # it elects itself, at once
    while True:
        states = [node.state() for node in nodes]
        if "PRIMARY" in states and set(states) <= {"PRIMARY", "SECONDARY"}:
            return
        for node in nodes:
            node.raise_if_ended()
        if time.monotonic() > deadline:
            raise NoPrimary(timeout=timeout, states=_report(nodes, states))
        candidates = [node for node, state in zip(nodes, states, strict=True) if state == "SECONDARY"]
        if candidates and not elected and "PRIMARY" not in states:
            with suppress(PyMongoError):
                candidates[next(turns) % len(candidates)].ask({"replSetStepUp": 1})
                elected = True  # and still busy becoming primary: asking another now would only unseat it
        time.sleep(POLL_SECONDS)


def wait_for_primary(nodes: Sequence[Node], *, timeout: float) -> Node:
    """Return the node that says it is primary; nodes that are down are passed over."""
    deadline = time.monotonic() + timeout
    while True:
        states = [node.state() for node in nodes]
        if "PRIMARY" in states:
            return nodes[states.index("PRIMARY")]
        if time.monotonic() > deadline:
            raise NoPrimary(timeout=timeout, states=_report(nodes, states))
        time.sleep(POLL_SECONDS)


def _report(nodes: Sequence[Node], states: Sequence[str]) -> list[str]:
    return [f"{node.host} {state}" for node, state in zip(nodes, states, strict=True)]
