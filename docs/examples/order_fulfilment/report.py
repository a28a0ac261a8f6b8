"""What the demo shows: a line of progress while it works, a table and the audit's answers at the end."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

from sagas import StopOutcome

from .audit import Audit, Question

if TYPE_CHECKING:
    from .lost_key import LostKey

__all__ = ["Progress", "Report"]

_BAR: Final = 20
_ERASE: Final = "\x1b[K"
"""To the end of the line (ECMA-48)."""
_PLAIN_EVERY_S: Final = 3.0
_FINDINGS_MAX: Final = 20


class Progress:
    """One line that is rewritten in place on a terminal; elsewhere a line every few seconds."""

    def __init__(self, total: int, *, out: TextIO = sys.stderr) -> None:
        self._total = total
        self._out = out
        self._in_place = out.isatty()
        self._started_at = time.monotonic()
        self._shown_at = 0.0

    def show(self, outcomes: Counter[str], *, kills: int, stops: int, last: bool = False) -> None:
        """Draw it, if it is time to."""
        now = time.monotonic()
        if not self._in_place and not last and now - self._shown_at < _PLAIN_EVERY_S:
            return
        self._shown_at = now
        done = outcomes.total()
        filled = _BAR * done // max(self._total, 1)
        others = "".join(f", {count} {what}" for what, count in sorted(outcomes.items()) if what != "completed")
        line = f"[{'#' * filled}{'.' * (_BAR - filled)}] {done:>4} of {self._total}: {outcomes['completed']} completed"
        line += f"{others} | {kills} killed | {stops} pressed Stop | {now - self._started_at:.0f} s"
        if self._in_place:
            width = shutil.get_terminal_size().columns - 1
            self._out.write(f"\r{line[:width]}{_ERASE}" + "\n" * last)
        else:
            self._out.write(f"{line}\n")
        self._out.flush()

    def say(self, text: str) -> None:
        """A line of its own, above the progress."""
        self._out.write(f"\r{text}{_ERASE}\n" if self._in_place else f"{text}\n")
        self._out.flush()


@dataclass(frozen=True)
class Report:
    """What the demo says at the end."""

    audit: Audit
    orders: int
    kills: int
    seconds: float
    reasons: Counter[str]
    """Why orders were undone."""
    lost_key: LostKey | None = None

    def as_json(self) -> dict[str, int | float]:
        """The object that `--json` prints."""
        return {
            "orders": self.orders,
            "completed": self.audit.completed,
            "compensated": self.audit.compensated,
            "cancelled": self.audit.cancelled,
            "held": self.audit.held,
            "unfinished": len(self.audit.unfinished),
            "worker_kills": self.kills,
            "stops_asked": self.audit.stops.total(),
            **{f"stops_{outcome}": self.audit.stops[outcome] for outcome in StopOutcome},
            "untrue_answers": self.audit.untrue_answers,
            "steps_run": self.audit.steps_run,
            "steps_replayed": self.audit.steps_replayed,
            "double_effects": self.audit.doubles,
            "missing_effects": self.audit.missing,
            **({"quarantined": lost.quarantined, "requeued": lost.requeued} if (lost := self.lost_key) else {}),
            "seconds": round(self.seconds, 1),
        }

    def as_text(self) -> str:
        """The table and the audit, for a person."""
        why = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
        cut_off = f"{self.audit.cut_off} requests were under way" if self.kills else ""
        stops = self.audit.stops
        answered = ", ".join(f"{stops[outcome]} {_said(outcome)}" for outcome in StopOutcome if stops[outcome])
        rows = [
            ("orders", self.orders, ""),
            ("  completed", self.audit.completed, "charged, shipped and announced"),
            ("  compensated", self.audit.compensated, f"undone: {why}" if why else ""),
            ("  cancelled", self.audit.cancelled, "undone: somebody pressed Stop" if self.audit.cancelled else ""),
            ("  held", self.audit.held, "waiting for an operator" if self.audit.held else ""),
            ("  unfinished", len(self.audit.unfinished), ""),
            ("worker kills", self.kills, cut_off),
            ("stops asked", stops.total(), answered),
            ("steps run", self.audit.steps_run, "outcomes in the journals"),
            ("steps replayed", self.audit.steps_replayed, "run again after an outage or a kill"),
            ("seconds", f"{self.seconds:.1f}", ""),
        ]
        if (lost := self.lost_key) is not None:
            rows.insert(-1, ("quarantined", lost.quarantined, f"{lost.customer}'s key was lost"))
            rows.insert(-1, ("requeued", lost.requeued, "and found again"))
        table = [f"{name:<16}{value:>8}   {note}".rstrip() for name, value, note in rows]
        answers = [self._answer(question) for question in Question]
        return "\n".join([*table, "", "Audit of the shop's ledgers against the runs", *answers, *self._details()])

    def _answer(self, question: Question) -> str:
        against = sum(finding.question is question for finding in self.audit.findings)
        return f"  {'no ' if against else 'yes'}  {question}" + (f" ({against} findings)" if against else "")

    def _details(self) -> list[str]:
        lines = [finding.text for finding in self.audit.findings]
        lines += [f"unfinished: {order}" for order in self.audit.unfinished]
        more = [f"  ... and {len(lines) - _FINDINGS_MAX} more"] if len(lines) > _FINDINGS_MAX else []
        return ["", *(f"  {line}" for line in lines[:_FINDINGS_MAX]), *more] if lines else []


def _said(outcome: StopOutcome) -> str:
    return outcome.replace("_", " ")
