"""Defining a saga: what is accepted, what is refused and in which words, and what follows from it."""

import asyncio
import functools
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass
from datetime import timedelta
from typing import Any

import pytest
import structlog.testing
from pydantic import BaseModel

from sagas.definition import Fate, Saga, Step, StepDefinition, StepKind
from sagas.errors import DefinitionError, SagaError
from sagas.policy import COMPENSATION_RETRY, FORWARD_RETRY, STEP_RETRY, RetryPolicy


class Order(BaseModel):
    total: int = 0


class BigOrder(Order):
    pass


async def reserve(order: Order, step: Step[Any]) -> Order:
    return Order(total=order.total + 1)


async def charge(order: Order, step: Step[Any]) -> Order:
    return order


async def release(order: Order, step: Step[Any]) -> None:
    return None


async def look(order: Order, step: Step[Any]) -> Order | None:
    return None


def plain(order: Order, step: Step[Any]) -> Order:
    return order


class Reserving:
    """A step with something of its own."""

    def __init__(self, by: int) -> None:
        self.by = by

    async def __call__(self, order: Order, step: Step[Any]) -> Order:
        return Order(total=order.total + self.by)


async def reserve_by(by: int, order: Order, step: Step[Any]) -> Order:
    return Order(total=order.total + by)


def anything(value: Any) -> Any:
    """What a type checker would refuse, for those who use none."""
    return value


def a_saga() -> Saga[Order]:
    return Saga("fulfil-order", Order)


def full_saga() -> Saga[Order]:
    """One step of every kind."""
    saga = a_saga()
    saga.step(reserve).compensation(release)
    saga.step(name="price", no_compensation=True)(reserve)
    saga.pivot(charge)
    saga.step(name="ship")(reserve)
    return saga


def a_step() -> Step[None]:
    return Step(run_id="r", saga="s", name="n", attempt=1, try_number=1, idempotency_key="k", resources=None)


# -------------------------------------------------------------------- what is refused


@dataclass(frozen=True)
class Wrong:
    """A definition that is refused, and what its message has to say: the step and the fix."""

    sentence: str
    define: Callable[[], object]
    step: str | None
    says: str


def define(**options: Any) -> Callable[[], object]:
    """`reserve` declared as a step with these options."""
    return lambda: a_saga().step(**options)(reserve)


def declared(function: Any, **options: Any) -> Callable[[], object]:
    """A function declared as the step `reserve` of its own saga."""
    return lambda: a_saga().step(name="reserve", no_compensation=True, **options)(function)


def with_step(then: Callable[[StepDefinition[Order]], object], **options: Any) -> Callable[[], object]:
    return lambda: then(a_saga().step(**options)(reserve))


def with_pivot(then: Callable[[StepDefinition[Order]], object]) -> Callable[[], object]:
    return lambda: then(a_saga().pivot(charge))


def after_pivot(then: Callable[[Saga[Order]], object]) -> Callable[[], object]:
    def run() -> object:
        saga = a_saga()
        saga.pivot(charge)
        return then(saga)

    return run


def when_in_use(then: Callable[[Saga[Order]], object]) -> Callable[[], object]:
    def run() -> object:
        saga = full_saga()
        assert saga.fingerprint
        return then(saga)

    return run


def a_hundred_and_one() -> object:
    saga = a_saga()
    for number in range(100):
        saga.step(name=f"step{number}", no_compensation=True)(reserve)
    return saga.step(no_compensation=True)(reserve)


async def one_argument(order: Order) -> Order:
    return order


async def three_arguments(order: Order, step: Step[Any], more: int) -> Order:
    return order


async def keyword_needed(order: Order, step: Step[Any], *, more: int) -> Order:
    return order


async def yields(order: Order, step: Step[Any]) -> Any:
    yield order


def yields_plainly(order: Order, step: Step[Any]) -> Iterator[Order]:
    yield order


async def returns_text(order: Order, step: Step[Any]) -> str:
    return ""


async def returns_nothing(order: Order, step: Step[Any]) -> None:
    return None


NAME_RULE = "a letter or underscore, then up to 63 letters, digits, underscores or hyphens"
FIRST_USE = "declare all its steps before a client or worker takes it"

WRONG = [
    # The saga itself.
    Wrong("a saga's name with a blank", lambda: Saga("fulfil order", Order), None, f"a saga's name is {NAME_RULE}"),
    Wrong("an empty name", lambda: Saga("", Order), None, NAME_RULE),
    Wrong("a name that begins with a digit", lambda: Saga("1st", Order), None, NAME_RULE),
    Wrong("a name of 65 characters", lambda: Saga("a" * 65, Order), None, NAME_RULE),
    Wrong("a name with a line end", lambda: Saga("order\n", Order), None, NAME_RULE),
    Wrong("a name that is no text", lambda: Saga(anything(7), Order), None, NAME_RULE),
    Wrong(
        "a context that is no model",
        lambda: Saga("s", anything(dict)),
        None,
        "must be a pydantic model class, not the class dict",
    ),
    Wrong("a context that is an instance", lambda: Saga("s", anything(Order())), None, "model class, not Order"),
    Wrong("version 0", lambda: Saga("s", Order, version=0), None, "version: must be at least 1"),
    Wrong("version 2**31", lambda: Saga("s", Order, version=2**31), None, "version: must be at most 2,147,483,647"),
    Wrong("version 10**5000", lambda: Saga("s", Order, version=10**5000), None, "version: must be at most"),
    Wrong("version 1.5", lambda: Saga("s", Order, version=anything(1.5)), None, "a whole number, not float"),
    Wrong("version True", lambda: Saga("s", Order, version=True), None, "a whole number, not bool"),
    Wrong("a deadline of nothing", lambda: Saga("s", Order, deadline=0), None, "deadline: must be above zero"),
    Wrong("no date of a deadline", lambda: Saga("s", Order, deadline=timedelta.max), None, "deadline: must be at most"),
    Wrong("a deadline in words", lambda: Saga("s", Order, deadline=anything("1")), None, "or seconds, not str"),
    Wrong("no steps", lambda: a_saga().fingerprint, None, "it has no steps; declare one with @saga.step"),
    # Names of steps.
    Wrong("a step's name with a dot", define(name="a.b"), "a.b", f"a step's name is {NAME_RULE}; pass name="),
    Wrong("an empty name for a step", define(name=""), "", NAME_RULE),
    Wrong("a step's name of 65 characters", define(name="a" * 65), "a" * 65, NAME_RULE),
    Wrong("a step's name that is no text", define(name=7), "7", NAME_RULE),
    Wrong("a lambda without a name", lambda: a_saga().step(lambda order, step: order), "<lambda>", "pass name="),
    Wrong(
        "two steps of one name",
        with_step(lambda step: step.saga.step(reserve)),
        "reserve",
        "two steps have this name; a journal could not tell them apart",
    ),
    Wrong(
        "a pivot with a step's name",
        with_step(lambda step: step.saga.pivot(name="reserve")(charge)),
        "reserve",
        "two steps have this name",
    ),
    Wrong("a hundred and one steps", a_hundred_and_one, "reserve", "a saga has at most 100 steps"),
    # Order and compensations.
    Wrong(
        "a step before the pivot without a compensation",
        with_step(lambda step: step.saga.fingerprint),
        "reserve",
        "write one (@reserve.compensation), or declare @saga.step(no_compensation=True)",
    ),
    Wrong(
        "the same in a saga without a pivot",
        with_step(lambda step: step.saga.steps),
        "reserve",
        "stands before the pivot and has no compensation",
    ),
    Wrong(
        "a second pivot",
        after_pivot(lambda saga: saga.pivot(name="charge-again")(charge)),
        "charge-again",
        "'charge' is the pivot already; a saga has one point of no return",
    ),
    Wrong(
        "no_compensation after the pivot",
        after_pivot(lambda saga: saga.step(no_compensation=True)(reserve)),
        "reserve",
        "after the pivot nothing is compensated; drop no_compensation",
    ),
    Wrong(
        "a compensation of the pivot",
        with_pivot(lambda step: step.compensation(release)),
        "charge",
        "has no compensation; give it a probe instead",
    ),
    Wrong(
        "a compensation after the pivot",
        after_pivot(lambda saga: saga.step(reserve).compensation(release)),
        "reserve",
        "never compensated; move it before the pivot, or drop this",
    ),
    Wrong(
        "a compensation of a step that needs none",
        with_step(lambda step: step.compensation(release), no_compensation=True),
        "reserve",
        "declared no_compensation=True and has a compensation; drop one of the two",
    ),
    Wrong(
        "two compensations",
        with_step(lambda step: (step.compensation(release), step.compensation(release))),
        "reserve",
        "two compensations; make them one function",
    ),
    Wrong(
        "two probes",
        with_step(lambda step: (step.probe(look), step.probe(look))),
        "reserve",
        "two probes; make them one function",
    ),
    # In use already.
    Wrong("a step when in use", when_in_use(lambda saga: saga.step(name="more")(reserve)), "more", FIRST_USE),
    Wrong("a probe when in use", when_in_use(lambda saga: saga.steps[0].probe(look)), "reserve", FIRST_USE),
    # Functions.
    Wrong("a text for a function", declared("reserve"), "reserve", "must be a function, not str"),
    Wrong("a class for a function", declared(Reserving), "reserve", "must be a function, not the class Reserving"),
    Wrong("an async generator", declared(yields), "reserve", "is a generator; return the context instead of yielding"),
    Wrong("a generator", declared(yields_plainly), "reserve", "is a generator"),
    Wrong(
        "one argument", declared(one_argument), "reserve", "two arguments, the context and the step: (context, step)"
    ),
    Wrong("three arguments", declared(three_arguments), "reserve", "must take two arguments"),
    Wrong("a keyword that has to be given", declared(keyword_needed), "reserve", "must take two arguments"),
    Wrong(
        "a partial that takes one", declared(functools.partial(reserve, Order())), "reserve", "must take two arguments"
    ),
    Wrong(
        "annotated to return something else",
        declared(returns_text),
        "reserve",
        "must return the context, Order; it is annotated to return str",
    ),
    Wrong("annotated to return nothing", declared(returns_nothing), "reserve", "annotated to return NoneType"),
    Wrong(
        "a transactional step in a thread",
        declared(plain, transactional=True),
        "reserve",
        "a transactional step must be async: its session belongs to the loop",
    ),
    Wrong(
        "a transactional pivot in a thread",
        lambda: a_saga().pivot(name="charge", transactional=True)(plain),
        "charge",
        "must be async",
    ),
    Wrong(
        "a compensation with one argument",
        with_step(lambda step: step.compensation(anything(one_argument))),
        "reserve",
        "its compensation must take two arguments",
    ),
    Wrong(
        "a probe that yields",
        with_step(lambda step: step.probe(yields)),
        "reserve",
        "its probe is a generator",
    ),
    # Options.
    Wrong("a number for a retry policy", define(retry=3), "reserve", "retry: must be RetryPolicy, not int"),
    Wrong("no tries at all for a retry policy", define(retry=0), "reserve", "retry: must be RetryPolicy, not int"),
    Wrong(
        "a number for a compensation's retry policy",
        with_step(lambda step: step.compensation(retry=anything(3))(release)),
        "reserve",
        "its compensation's retry: must be RetryPolicy, not int",
    ),
    Wrong("a timeout of zero", define(timeout=0), "reserve", "timeout: must be above zero"),
    Wrong("a negative timeout", define(timeout=timedelta(seconds=-1)), "reserve", "timeout: must be above zero"),
    Wrong("a timeout below a microsecond", define(timeout=1e-9), "reserve", "timeout: must be above zero"),
    Wrong("a timeout in words", define(timeout="10"), "reserve", "timeout: must be a timedelta, or seconds, not str"),
    Wrong("a truth for a timeout", define(timeout=True), "reserve", "not bool"),
    Wrong("a timeout without end", define(timeout=float("inf")), "reserve", "timeout"),
    Wrong("a timeout that is no number", define(timeout=float("nan")), "reserve", "timeout"),
    Wrong("a timeout of more than a timedelta holds", define(timeout=10**15), "reserve", "timeout"),
    Wrong("a timeout of more than a date holds", define(timeout=timedelta.max), "reserve", "timeout: must be at most"),
    Wrong("a negative grace", define(stop_grace=-1), "reserve", "stop_grace: must not be negative"),
    Wrong("a grace without end", define(stop_grace=timedelta.max), "reserve", "stop_grace: must be at most"),
    Wrong("a grace in words", define(stop_grace="10"), "reserve", "stop_grace: must be a timedelta, or seconds"),
    Wrong("a flag in words", define(transactional="no"), "reserve", "transactional: must be True or False, not str"),
    Wrong("another flag in words", define(no_compensation="no"), "reserve", "no_compensation: must be True or False"),
    Wrong(
        "a compensation's timeout of zero",
        with_step(lambda step: step.compensation(timeout=0)(release)),
        "reserve",
        "its compensation's timeout: must be above zero",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.sentence)
def test_a_wrong_definition_is_refused_with_the_step_and_the_fix(wrong: Wrong) -> None:
    with pytest.raises(DefinitionError) as refused:
        wrong.define()
    assert wrong.says in str(refused.value)
    assert refused.value.step == wrong.step
    if wrong.step:
        assert f"saga 'fulfil-order', step '{wrong.step}': " in str(refused.value)
    else:
        assert str(refused.value).startswith(f"saga {refused.value.saga!r}")


def test_a_refusal_is_an_error_of_this_project() -> None:
    with pytest.raises(SagaError):
        Saga("no good", Order)


def test_a_pivot_declared_when_in_use_is_refused() -> None:
    saga = a_saga()
    saga.step(reserve).compensation(release)
    assert saga.steps
    with pytest.raises(DefinitionError, match=FIRST_USE):
        saga.pivot(charge)


def test_a_compensation_declared_when_in_use_is_refused() -> None:
    saga = a_saga()
    declare = saga.step(reserve).compensation
    declare(release)
    late = saga.step(name="late", no_compensation=True)(reserve)
    assert saga.steps
    late.kind = StepKind.COMPENSATED  # as if it had been declared to have one
    with pytest.raises(DefinitionError, match=FIRST_USE):
        late.compensation(release)


def test_a_refused_look_leaves_the_definition_open_to_be_mended() -> None:
    saga = a_saga()
    step = saga.step(reserve)
    with pytest.raises(DefinitionError):
        _ = saga.fingerprint
    step.compensation(release)
    assert saga.fingerprint == "reserve:c"


def test_a_decorator_kept_for_several_steps_knows_what_has_been_declared_since() -> None:
    saga = a_saga()
    light = saga.step(no_compensation=True)
    light(reserve)
    saga.pivot(charge)
    with pytest.raises(DefinitionError, match="after the pivot nothing is compensated"):
        light(anything(look))


def test_a_decorator_kept_for_two_compensations_refuses_the_second() -> None:
    declare = a_saga().step(reserve).compensation(timeout=5)
    declare(release)
    with pytest.raises(DefinitionError, match="two compensations"):
        declare(release)


def test_a_step_of_another_saga_is_no_function() -> None:
    other = a_saga().step(reserve)
    with pytest.raises(DefinitionError, match="must be a function"):
        Saga("another", Order).step(name="reserve", no_compensation=True)(other)


# -------------------------------------------------------------------- kinds, order, fingerprint


def test_a_steps_kind_follows_from_its_place_and_what_it_declares() -> None:
    assert [(step.name, step.kind) for step in full_saga().steps] == [
        ("reserve", StepKind.COMPENSATED),
        ("price", StepKind.UNCOMPENSATED),
        ("charge", StepKind.PIVOT),
        ("ship", StepKind.FORWARD),
    ]


def test_a_fingerprint_is_names_kinds_and_order() -> None:
    assert full_saga().fingerprint == "reserve:c price:n charge:p ship:r"


def test_a_fingerprint_is_of_nothing_else() -> None:
    changed = Saga("other", Order, version=3)
    changed.step(retry=RetryPolicy(max_attempts=1), timeout=1, name="reserve", transactional=True)(
        Reserving(2)
    ).compensation(release)
    changed.step(name="price", no_compensation=True)(reserve).probe(look)
    changed.pivot(charge).probe(look)
    changed.step(name="ship")(plain)
    assert changed.fingerprint == full_saga().fingerprint


@pytest.mark.parametrize(
    ("names", "fingerprint"),
    [(["a", "b"], "a:n b:n"), (["b", "a"], "b:n a:n"), (["a"], "a:n"), (["a_b", "c-D9"], "a_b:n c-D9:n")],
)
def test_a_fingerprint_differs_where_names_or_order_do(names: list[str], fingerprint: str) -> None:
    saga = a_saga()
    for name in names:
        saga.step(name=name, no_compensation=True)(reserve)
    assert saga.fingerprint == fingerprint


def test_a_pivot_alone_is_a_saga() -> None:
    saga = a_saga()
    saga.pivot(charge)
    assert saga.fingerprint == "charge:p"
    assert not saga.plain


def test_a_saga_without_pivot_and_compensations_is_a_plain_durable_function() -> None:
    saga = a_saga()
    saga.step(no_compensation=True)(reserve)
    assert saga.plain


def test_one_compensation_makes_it_more_than_plain() -> None:
    saga = a_saga()
    saga.step(name="price", no_compensation=True)(reserve)
    saga.step(reserve).compensation(release)
    assert not saga.plain


def test_a_hundred_steps_are_accepted() -> None:
    saga = a_saga()
    for number in range(100):
        saga.step(name=f"step{number}", no_compensation=True)(reserve)
    assert len(saga.steps) == 100


@pytest.mark.parametrize("name", ["a", "_", "A-b_9", "a" * 64])
def test_names_of_letters_digits_underscores_and_hyphens_are_accepted(name: str) -> None:
    assert Saga(name, Order).step(name=name, no_compensation=True)(reserve).name == name


def test_a_version_is_one_unless_told() -> None:
    assert a_saga().version == 1
    assert Saga("s", Order, version=7).version == 7
    assert repr(Saga("s", Order, version=7)) == "Saga('s', version=7)"


# -------------------------------------------------------------------- the decorators


def test_decorators_work_with_and_without_parentheses() -> None:
    saga = a_saga()

    @saga.step
    async def first(order: Order, step: Step[Any]) -> Order:
        return order

    @first.compensation
    async def undo_first(order: Order, step: Step[Any]) -> None:
        return None

    @saga.step()
    async def second(order: Order, step: Step[Any]) -> Order:
        return order

    @second.compensation()
    async def undo_second(order: Order, step: Step[Any]) -> None:
        return None

    @second.probe
    async def find_second(order: Order, step: Step[Any]) -> Order | None:
        return None

    @saga.pivot()
    async def third(order: Order, step: Step[Any]) -> Order:
        return order

    assert saga.fingerprint == "first:c second:c third:p"
    assert first.undo is not None
    assert first.undo.function is undo_first
    assert second.undo is not None
    assert second.undo.function is undo_second
    assert second.question is not None
    assert second.question.function is find_second


async def test_a_step_called_directly_is_its_function() -> None:
    step = a_saga().step(reserve)
    returned = step(Order(total=1), a_step())
    assert not isinstance(returned, Order)
    assert await returned == Order(total=2)
    assert a_saga().step(name="plain")(plain)(Order(total=1), a_step()) == Order(total=1)


@pytest.mark.parametrize(
    ("function", "name", "in_thread"),
    [
        (reserve, "reserve", False),
        (plain, "plain", True),
        (Reserving(2), "Reserving", False),
        (functools.partial(reserve_by, 2), "reserve_by", False),
        (functools.partial(functools.partial(reserve_by), 2), "reserve_by", False),
        (functools.partial(plain), "plain", True),
        (Reserving(2).__call__, "__call__", False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_functions_partials_methods_and_callable_objects_are_accepted(
    function: Any, name: str, in_thread: bool
) -> None:
    step = a_saga().step(no_compensation=True)(function)
    assert (step.name, step.forward.in_thread) == (name, in_thread)


def test_a_partial_of_an_async_callable_object_runs_on_the_loop() -> None:
    step = a_saga().step(no_compensation=True)(functools.partial(Reserving(2)))
    assert step.forward.in_thread is False


def test_compensations_and_probes_may_be_plain_functions_too() -> None:
    def undo(order: Order, step: Step[Any]) -> None:
        return None

    step = a_saga().step(reserve)
    step.compensation(undo)
    step.probe(plain)
    assert step.undo is not None
    assert step.question is not None
    assert step.undo.in_thread
    assert step.question.in_thread


@pytest.mark.parametrize("returned", [Order, BigOrder, "Order", "NotDefinedAnywhere", Any, Order | None, None], ids=str)
def test_what_a_step_is_annotated_to_return_is_refused_only_where_it_is_certainly_wrong(returned: Any) -> None:
    async def step(order: Any, step: Any) -> Any:
        return order

    if returned is None:
        del step.__annotations__["return"]
    else:
        step.__annotations__["return"] = returned
    assert a_saga().step(no_compensation=True)(step).name == "step"


@pytest.mark.parametrize("annotation", ["1 +", "{}['x']", "Order[0]"])
def test_an_annotation_that_cannot_be_read_is_none(annotation: str) -> None:
    async def step(order: Any, step: Any) -> Any:
        return order

    step.__annotations__["order"] = annotation
    assert a_saga().step(no_compensation=True)(step).name == "step"


def test_annotations_of_compensations_and_probes_are_their_own() -> None:
    step = a_saga().step(reserve)
    undo: Any = step.compensation(anything(returns_text))
    assert undo is returns_text
    assert step.probe(look) is look


# -------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (10, timedelta(seconds=10)),
        (0.25, timedelta(milliseconds=250)),
        (timedelta(minutes=5), timedelta(minutes=5)),
        (None, None),
    ],
)
def test_a_timeout_is_seconds_a_timedelta_or_none(given: Any, taken: timedelta | None) -> None:
    saga = a_saga()
    step = saga.step(timeout=given)(reserve)
    step.compensation(timeout=given)(release)
    pivot = saga.pivot(timeout=given)(charge)
    assert step.undo is not None
    assert [step.forward.timeout, step.undo.timeout, pivot.forward.timeout] == [taken] * 3


def test_without_options_a_try_takes_a_minute_and_is_repeated_by_its_place() -> None:
    reserved, priced, pivot, shipped = full_saga().steps
    assert reserved.undo is not None
    parts = [reserved.forward, priced.forward, pivot.forward, shipped.forward, reserved.undo]
    assert [part.timeout for part in parts] == [timedelta(seconds=60)] * 5
    assert [part.retry for part in parts] == [STEP_RETRY, STEP_RETRY, STEP_RETRY, FORWARD_RETRY, COMPENSATION_RETRY]


def test_a_probe_takes_as_long_and_is_repeated_like_its_step() -> None:
    retry = RetryPolicy(max_attempts=9)
    step = a_saga().step(retry=retry, timeout=5)(reserve)
    step.probe(look)
    assert step.question is not None
    assert (step.question.retry, step.question.timeout) == (retry, timedelta(seconds=5))


def test_options_are_the_steps_own() -> None:
    retry, undo_retry = RetryPolicy(max_attempts=2), RetryPolicy(max_attempts=3)
    saga = a_saga()
    step = saga.step(retry=retry, transactional=True)(reserve)
    step.compensation(retry=undo_retry)(release)
    pivot = saga.pivot(retry=retry, transactional=True)(charge)
    later = saga.step(name="ship", retry=retry, transactional=True)(reserve)
    assert step.undo is not None
    assert step.undo.retry == undo_retry
    assert [one.forward.retry for one in (step, pivot, later)] == [retry] * 3
    assert [one.transactional for one in (step, pivot, later)] == [True] * 3
    assert not any(one.transactional for one in full_saga().steps)


# -------------------------------------------------------------------- what a step is given


def test_what_a_step_is_given_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        a_step().attempt = 2  # type: ignore[misc]


def test_a_step_is_sure_of_its_fate_unless_told() -> None:
    assert a_step().fate is Fate.KNOWN
    assert a_step().session is None


def test_a_steps_log_names_run_saga_step_attempt_and_try() -> None:
    with structlog.testing.capture_logs() as logs:
        a_step().log.info("reserving", stock=3)
    assert logs == [
        {
            "event": "reserving",
            "log_level": "info",
            "run": "r",
            "saga": "s",
            "step": "n",
            "attempt": 1,
            "try_": 1,
            "stock": 3,
        }
    ]


def test_a_definition_needs_no_event_loop() -> None:
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    assert full_saga().steps
