"""What an application developer writes: a saga of forward steps, one pivot, compensations and probes.

A definition is checked as it is built: what one decorator can see is refused there, what only the whole can show (a
missing compensation) when a client or a worker first takes it, before anything runs. Every refusal names the saga, the
step and the fix.

Longer than other modules: what may be written and what is refused belong together, and half of it is the refusals.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, StrEnum
from typing import Any, Final, Generic, overload

from pydantic import BaseModel
from typing_extensions import TypeVar

from sagas.errors import DefinitionError, InvalidInput
from sagas.log import get_logger
from sagas.policy import COMPENSATION_RETRY, FORWARD_RETRY, STEP_RETRY, RetryPolicy
from sagas_store.inputs import check_flag, check_kind, kind_of
from sagas_store.numbers import NONE, check_count, check_duration

__all__ = [
    "STEPS_MAX",
    "Fate",
    "Part",
    "Saga",
    "Step",
    "StepDefinition",
    "StepKind",
    "StopAsked",
    "is_plain",
    "kinds_of",
]

C = TypeVar("C", bound=BaseModel)
R = TypeVar("R", default=Any)

StepFunction = Callable[[C, "Step[Any]"], Awaitable[C] | C]
CompensationFunction = Callable[[C, "Step[Any]"], Awaitable[None] | None]
ProbeFunction = Callable[[C, "Step[Any]"], Awaitable[C | None] | C | None]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
STEPS_MAX: Final = 100
DEFAULT_TIMEOUT: Final = timedelta(seconds=60)
STOP_GRACE: Final = timedelta(seconds=10)


class Fate(StrEnum):
    """What the journal knows of a step's effect when its compensation runs."""

    KNOWN = "known"
    """The step succeeded: there is something to undo."""
    IN_DOUBT = "in_doubt"
    """It may have happened or not (a timeout, a lost worker). Undo it if it is there, and accept that it may not be."""


class StopAsked(asyncio.Event):
    """Whether a stop was asked: `if step.stop_asked`, or `await step.stop_asked.wait()`."""

    def __bool__(self) -> bool:
        """Whether it is set; an event that were always true would turn back every step that looks at it."""
        return self.is_set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[R]):
    """What a step, compensation or probe is given beside the context. `R` is the type of the worker's resources."""

    run_id: str
    saga: str
    name: str
    attempt: int
    """Which claim of the run this is, from 1."""
    try_number: int
    """Which execution of this step this is, from 1, as far as the journal knows. One that a crash or a drain cut short
    counts here, though not for the retry policy; and one that was announced may count although it never began."""
    idempotency_key: str
    """The same for every try of this step of this run, on every worker and version; its compensation has another.
    Give it to whoever carries out the effect, so that a repeated request has the effect once."""
    resources: R
    """The worker's `resources`: connections, clients, settings."""
    stop_asked: StopAsked = field(default_factory=StopAsked)
    """True once a stop is asked that will be honoured, or the deadline passes: a step may look at it, or wait for it
    (`await step.stop_asked.wait()`), and finish early. After the step's `stop_grace` it is broken off."""
    fate: Fate = Fate.KNOWN
    """For compensations: whether the step's effect is known to have happened."""
    step_key: str = ""
    """The step's own idempotency key, also for its compensation. Whoever has not seen it when it is undone should
    remember it and refuse it when it arrives late: the step's request may still be under way."""
    tenant: str | None = None
    """Whose run it is."""
    session: Any = None
    """For transactional steps: the driver's session; pass it to every operation that shall commit with its outcome."""

    @property
    def log(self) -> Any:
        """A structlog logger, bound to run, saga, step, attempt and try."""
        return get_logger("sagas.step").bind(
            run=self.run_id, saga=self.saga, step=self.name, attempt=self.attempt, try_=self.try_number
        )


class StepKind(Enum):
    """What follows from a step's place. The value is its letter in the fingerprint."""

    COMPENSATED = "c"
    """Before the pivot, with a compensation."""
    UNCOMPENSATED = "n"
    """Before the pivot, declared to need none."""
    PIVOT = "p"
    """The point of no return."""
    FORWARD = "r"
    """After the pivot: retried until it is done, never compensated."""


@dataclass(frozen=True, slots=True)
class Part:
    """One function of a step, with how long a try may take and when it is tried again."""

    function: Callable[..., Any]
    retry: RetryPolicy
    timeout: timedelta | None
    in_thread: bool
    """A plain `def`: run in a thread, which a timeout leaves behind but cannot stop."""


@dataclass(slots=True, eq=False)
class StepDefinition(Generic[C]):
    """A step as declared. Decorate its compensation and probe with `@step.compensation` and `@step.probe`."""

    saga: Saga[C]
    name: str
    kind: StepKind
    forward: Part
    transactional: bool
    stop_grace: timedelta
    """How long a step in hand may go on once a stop is asked, before it is broken off and counts as in doubt."""
    undo: Part | None = field(default=None)
    question: Part | None = field(default=None)

    def __call__(self, context: C, step: Step[Any]) -> Awaitable[C] | C:
        """Call the step's function itself, for instance from a unit test."""
        return typing.cast("Awaitable[C] | C", self.forward.function(context, step))

    @overload
    def compensation(self, function: CompensationFunction[C], /) -> CompensationFunction[C]: ...
    @overload
    def compensation(
        self, /, *, retry: RetryPolicy | None = None, timeout: float | timedelta | None = DEFAULT_TIMEOUT
    ) -> Callable[[CompensationFunction[C]], CompensationFunction[C]]: ...
    def compensation(
        self,
        function: CompensationFunction[C] | None = None,
        /,
        *,
        retry: RetryPolicy | None = None,
        timeout: float | timedelta | None = DEFAULT_TIMEOUT,
    ) -> Any:
        """Declare how this step is undone. It must tolerate that there is nothing to undo.

        It is given the context as the run last knew it, and is tried again (`retry`, by default twelve tries over about
        half an hour) for as long as it fails.
        """
        if self.kind is StepKind.PIVOT:
            raise self._wrong("the pivot is the point of no return and has no compensation; give it a probe instead")
        if self.kind is StepKind.FORWARD:
            raise self._wrong("a step after the pivot is never compensated; move it before the pivot, or drop this")
        if self.kind is StepKind.UNCOMPENSATED:
            raise self._wrong("it is declared no_compensation=True and has a compensation; drop one of the two")

        def declare(function: CompensationFunction[C]) -> CompensationFunction[C]:
            self.saga.require_open(self.name)
            if self.undo is not None:
                raise self._wrong("it has two compensations; make them one function")
            self.undo = _part(
                self.saga,
                self.name,
                "compensation",
                function,
                retry=COMPENSATION_RETRY if retry is None else retry,
                timeout=timeout,
            )
            return function

        return declare if function is None else declare(function)

    def probe(self, function: ProbeFunction[C]) -> ProbeFunction[C]:
        """Declare how to find out whether this step's effect happened: return the context if so, None if not.

        Asked when a try's outcome is unknown, before the step is run again. Tried again as the step itself is.
        """
        if self.question is not None:
            raise self._wrong("it has two probes; make them one function")
        self.saga.require_open(self.name)
        self.question = _part(
            self.saga, self.name, "probe", function, retry=self.forward.retry, timeout=self.forward.timeout
        )
        return function

    def _wrong(self, problem: str) -> DefinitionError:
        return DefinitionError(self.saga.name, self.name, problem)


def kinds_of(fingerprint: str) -> dict[str, str]:
    """The value of each step's `StepKind` by the step's name, in order, also where the definition is not at hand."""
    return dict(part.rsplit(":", 1) for part in fingerprint.split())


def is_plain(fingerprint: str) -> bool:
    """Whether it is of a plain durable function: nothing of it can be undone, and nothing is a pivot."""
    return set(kinds_of(fingerprint).values()) <= {StepKind.UNCOMPENSATED.value}


class Saga(Generic[C]):
    """A saga: its name, the type of its context, its version and its steps in order.

    The context is a pydantic model; every step gets the one before's and returns the next. Raise `version` whenever the
    steps' names, kinds or order change: runs of the old version wait for a worker that still serves it.
    """

    def __init__(
        self, name: str, context: type[C], *, version: int = 1, deadline: float | timedelta | None = None
    ) -> None:
        """Name it, and give the type of its context.

        `deadline` (a timedelta, or seconds): how long after its start a run may take to reach its pivot; then it is
        undone (`timed_out`).
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DefinitionError(str(name), None, _name_problem("a saga"))
        if not (inspect.isclass(context) and issubclass(context, BaseModel)):
            raise DefinitionError(name, None, f"the context must be a pydantic model class, not {kind_of(context)}")
        with _defining(name):
            check_count("version", version)
            self.deadline: Final = check_duration("deadline", deadline) if deadline is not None else None
        self.name: Final = name
        self.context: Final = context
        self.version: Final = version
        self._steps: list[StepDefinition[C]] = []
        self._frozen = False

    def __repr__(self) -> str:
        return f"Saga({self.name!r}, version={self.version})"

    # ---------------------------------------------------------------- declaring

    @overload
    def step(self, function: StepFunction[C], /) -> StepDefinition[C]: ...
    @overload
    def step(
        self,
        /,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | timedelta | None = DEFAULT_TIMEOUT,
        no_compensation: bool = False,
        transactional: bool = False,
        stop_grace: float | timedelta = STOP_GRACE,
    ) -> Callable[[StepFunction[C]], StepDefinition[C]]: ...
    def step(
        self,
        function: StepFunction[C] | None = None,
        /,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | timedelta | None = DEFAULT_TIMEOUT,
        no_compensation: bool = False,
        transactional: bool = False,
        stop_grace: float | timedelta = STOP_GRACE,
    ) -> Any:
        """Declare the next step. Before the pivot it needs a compensation, or `no_compensation=True`.

        `timeout` bounds one try (a timedelta, or seconds; default 60 s, None for no bound); a try that is over it is in
        doubt. `retry` defaults to five tries before the pivot and three days after it. `transactional=True` gives the
        step a MongoDB session: what it writes with it commits together with the step's outcome, so exactly once.
        """

        def declare(function: StepFunction[C]) -> StepDefinition[C]:
            with _defining(self.name, _name_of(function, name)):
                check_flag("no_compensation", no_compensation)
            if self._has_pivot:
                kind = StepKind.FORWARD
            else:
                kind = StepKind.UNCOMPENSATED if no_compensation else StepKind.COMPENSATED
            if no_compensation and kind is StepKind.FORWARD:
                raise DefinitionError(
                    self.name, _name_of(function, name), "after the pivot nothing is compensated; drop no_compensation"
                )
            return self._add(function, name, kind, retry, timeout, transactional=transactional, stop_grace=stop_grace)

        return declare if function is None else declare(function)

    @overload
    def pivot(self, function: StepFunction[C], /) -> StepDefinition[C]: ...
    @overload
    def pivot(
        self,
        /,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | timedelta | None = DEFAULT_TIMEOUT,
        transactional: bool = False,
    ) -> Callable[[StepFunction[C]], StepDefinition[C]]: ...
    def pivot(
        self,
        function: StepFunction[C] | None = None,
        /,
        *,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | timedelta | None = DEFAULT_TIMEOUT,
        transactional: bool = False,
    ) -> Any:
        """Declare the point of no return: the step after which the run completes forward, whatever happens."""

        def declare(function: StepFunction[C]) -> StepDefinition[C]:
            if self._has_pivot:
                first = next(step.name for step in self._steps if step.kind is StepKind.PIVOT)
                raise DefinitionError(
                    self.name,
                    _name_of(function, name),
                    f"{first!r} is the pivot already; a saga has one point of no return",
                )
            return self._add(function, name, StepKind.PIVOT, retry, timeout, transactional=transactional)

        return declare if function is None else declare(function)

    # ---------------------------------------------------------------- the finished definition

    @functools.cached_property
    def steps(self) -> tuple[StepDefinition[C], ...]:
        """The steps in order. The first look at them checks the whole and closes the definition."""
        if not self._steps:
            raise DefinitionError(self.name, None, "it has no steps; declare one with @saga.step")
        for step in self._steps:
            if step.kind is StepKind.COMPENSATED and step.undo is None:
                raise DefinitionError(
                    self.name,
                    step.name,
                    f"it stands before the pivot and has no compensation; write one (@{step.name}.compensation), or "
                    "declare @saga.step(no_compensation=True) if it has no effect to undo",
                )
        self._frozen = True
        return tuple(self._steps)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names, kinds and order of the steps, readable so that a difference can be named: `reserve:c charge:p`."""
        return " ".join(f"{step.name}:{step.kind.value}" for step in self.steps)

    @functools.cached_property
    def pivot_at(self) -> int | None:
        """The pivot's place among the steps, from 0; None where there is none."""
        return next((place for place, step in enumerate(self.steps) if step.kind is StepKind.PIVOT), None)

    @functools.cached_property
    def plain(self) -> bool:
        """Whether nothing of it can be undone and nothing is a pivot: a plain durable function."""
        return is_plain(self.fingerprint)

    @property
    def _has_pivot(self) -> bool:
        return any(step.kind is StepKind.PIVOT for step in self._steps)

    # ---------------------------------------------------------------- checks

    def require_open(self, step: str) -> None:
        """Raise DefinitionError once a client or worker has taken the saga."""
        if self._frozen:
            raise DefinitionError(
                self.name, step, "the saga is in use already; declare all its steps before a client or worker takes it"
            )

    def _add(
        self,
        function: StepFunction[C],
        name: str | None,
        kind: StepKind,
        retry: RetryPolicy | None,
        timeout: float | timedelta | None,
        *,
        transactional: bool,
        stop_grace: float | timedelta = STOP_GRACE,
    ) -> StepDefinition[C]:
        name = _name_of(function, name)
        self.require_open(name)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DefinitionError(self.name, str(name), _name_problem("a step") + "; pass name=")
        if any(step.name == name for step in self._steps):
            raise DefinitionError(self.name, name, "two steps have this name; a journal could not tell them apart")
        if len(self._steps) >= STEPS_MAX:
            raise DefinitionError(self.name, name, f"a saga has at most {STEPS_MAX} steps")
        default = FORWARD_RETRY if kind is StepKind.FORWARD else STEP_RETRY
        with _defining(self.name, name):
            check_flag("transactional", transactional)
            grace = check_duration("stop_grace", stop_grace, least=NONE)
        part = _part(self, name, "step", function, retry=default if retry is None else retry, timeout=timeout)
        step = StepDefinition(
            saga=self, name=name, kind=kind, forward=part, transactional=transactional, stop_grace=grace
        )
        if transactional and part.in_thread:
            raise DefinitionError(
                self.name, name, "a transactional step must be async: its session belongs to the loop"
            )
        self._steps.append(step)
        return step


@contextlib.contextmanager
def _defining(saga: str, step: str | None = None) -> Iterator[None]:
    """What an argument of a definition must be is said as everywhere, under the definition's own class of error."""
    try:
        yield
    except InvalidInput as refused:
        raise DefinitionError(saga, step, str(refused)) from None


def _part(
    saga: Saga[Any], step: str, what: str, function: Any, *, retry: Any, timeout: float | timedelta | None
) -> Part:
    def wrong(problem: str) -> DefinitionError:
        return DefinitionError(saga.name, step, f"its {what} {problem}" if what != "step" else problem)

    if not callable(function) or inspect.isclass(function) or isinstance(function, StepDefinition):
        raise wrong(f"must be a function, not {kind_of(function)}")
    call = function if inspect.isroutine(function) or isinstance(function, functools.partial) else function.__call__
    bare = _unwrapped(function)
    if inspect.isgeneratorfunction(bare) or inspect.isasyncgenfunction(bare):
        raise wrong("is a generator; return the context instead of yielding")
    _check_arguments(call, wrong)
    if what == "step":
        _check_annotation(function, saga.context, wrong)
    whose = f"its {what}'s " if what != "step" else ""
    with _defining(saga.name, step):
        check_kind(f"{whose}retry", retry, RetryPolicy, "RetryPolicy(max_attempts=5)")
        limit = check_duration(f"{whose}timeout", timeout) if timeout is not None else None
    return Part(function, retry, limit, in_thread=not inspect.iscoroutinefunction(bare))


def _unwrapped(function: Any) -> Any:
    """The function that is called in the end, below partials and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else function.__call__


def _check_annotation(function: Any, context: type[BaseModel], wrong: Callable[[str], DefinitionError]) -> None:
    try:
        returned = typing.get_type_hints(function).get("return", context)
    except Exception:
        return  # names that only a type checker sees; what the step returns is checked when it does
    if returned is not Any and inspect.isclass(returned) and not issubclass(returned, context):
        raise wrong(f"must return the context, {context.__name__}; it is annotated to return {returned.__name__}")


def _check_arguments(call: Any, wrong: Callable[[str], DefinitionError]) -> None:
    try:
        inspect.signature(call).bind(None, None)
    except TypeError:
        raise wrong("must take two arguments, the context and the step: (context, step)") from None
    except ValueError:
        return  # a builtin without a signature: calling it will tell


def _name_of(function: Any, name: str | None) -> str:
    if name is not None:
        return name
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _name_problem(what: str) -> str:
    return f"{what}'s name is a letter or underscore, then up to 63 letters, digits, underscores or hyphens"
