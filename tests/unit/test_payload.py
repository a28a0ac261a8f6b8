"""Contexts and errors as bytes: what comes back, what is refused, and that no message ever shows a value."""

import contextlib
import json
import traceback
import warnings
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, computed_field, field_serializer, field_validator

from sagas.errors import ErrorDetail, SagaError, Unreadable
from sagas.payload import NotJournalable, dump_context, dump_error, is_same_context, load_context, load_error

CANARY = "canary-4929-1234"
"""A value that must not turn up in any message, warning or name."""


class Line(BaseModel):
    sku: str
    count: int = 1


class Order(BaseModel):
    """A bit of everything that an application keeps in its context."""

    number: int = 0
    text: str = ""
    ratio: float = 0.0
    price: Decimal = Decimal(0)
    placed_at: datetime | None = None
    takes: timedelta = timedelta(0)
    token: UUID | None = None
    lines: list[Line] = Field(default_factory=list)
    stock: dict[str, int] = Field(default_factory=dict)
    tags: set[str] = Field(default_factory=set)
    data: bytes = b""
    anything: Any = None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: int = 0


class Picky(BaseModel):
    """Its own code runs when it is read."""

    text: str = ""

    @field_validator("text")
    @classmethod
    def no_canary(cls, text: str) -> str:
        if CANARY in text:
            raise KeyError(text)  # an error of its own, not one that pydantic expects
        return text


class Unwritable(BaseModel):
    """Its own code runs when it is written, and quotes the value."""

    text: str = ""

    @field_serializer("text")
    def quote(self, text: str) -> str:
        raise ValueError(f"cannot write {text}")


class Uncomputable(BaseModel):
    text: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def quoted(self) -> str:
        raise KeyError(self.text)


def whole(error: BaseException) -> str:
    """Everything that a log would show of an exception."""
    return "".join(traceback.format_exception(error))


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def circular() -> list[Any]:
    circle: list[Any] = [CANARY]
    circle.append(circle)
    return circle


# -------------------------------------------------------------------- contexts that come back


@pytest.mark.parametrize(
    "order",
    [
        Order(),
        Order(number=7, text="Größe Ü ✓ \x00 \u2028", ratio=0.1, price=Decimal("19.90")),
        Order(placed_at=datetime(2026, 6, 1, 12, 30, 15, 123456, tzinfo=UTC), takes=timedelta(days=3, microseconds=1)),
        Order(token=UUID(int=7), lines=[Line(sku="a"), Line(sku="b", count=2)], stock={"a": 1}, tags={"x"}),
        Order(data=b"plain bytes", anything={"a": [1, None, True, "x"]}),
    ],
    ids=range(5),
)
def test_a_context_comes_back_as_it_was(order: Order) -> None:
    payload, read_back = dump_context(Order, order)
    assert read_back == order
    assert load_context(Order, payload, "the context") == order


@given(st.builds(Line, sku=st.text(st.characters(codec="utf-8")), count=st.integers()))
def test_any_context_comes_back_as_it_was(line: Line) -> None:
    assert dump_context(Line, line)[1] == line


def test_what_is_handed_on_is_read_back_and_not_the_object_itself() -> None:
    order = Order(lines=[Line(sku="a")])
    _, read_back = dump_context(Order, order)
    order.lines.append(Line(sku="b"))
    assert read_back.lines == [Line(sku="a")]


def test_what_is_handed_on_is_the_same_as_what_a_replay_reads() -> None:
    order = Order(anything=(1, 2))  # JSON knows no tuples
    payload, read_back = dump_context(Order, order)
    assert read_back.anything == [1, 2]
    assert read_back == load_context(Order, payload, "the context")


def test_a_payload_begins_with_its_form() -> None:
    payload, _ = dump_context(Line, Line(sku="a"))
    assert payload == b'\x01{"sku":"a","count":1}'


def test_a_payload_of_the_first_version_is_read_for_ever() -> None:
    assert load_context(Line, b'\x01{"sku":"a","count":2}', "the context") == Line(sku="a", count=2)


def test_a_subclass_comes_back_as_the_context() -> None:
    class Special(Line):
        note: str = ""

    _, read_back = dump_context(Line, Special(sku="a", note="x"))
    assert type(read_back) is Line


# -------------------------------------------------------------------- contexts that cannot be journaled


def number_holding(value: Any) -> Order:
    order = Order()
    order.number = value  # no model checks an assignment unless told to
    return order


def stock_holding(value: Any) -> Order:
    order = Order()
    order.stock = {CANARY: value}
    return order


@pytest.mark.parametrize(
    ("model", "value", "says"),
    [
        (Order, None, "it returned NoneType, not the context (Order); was a return forgotten?"),
        (Order, CANARY, "it returned str, not the context (Order)"),
        (Order, {"number": 1}, "it returned dict, not the context (Order)"),
        (Order, Line(sku=CANARY), "it returned Line, not the context (Order)"),
        (Order, Order, "it returned ModelMetaclass, not the context (Order)"),
        (Order, Order(anything=object()), "its Order cannot be written as JSON"),
        (Order, Order(anything=circular()), "its Order cannot be written as JSON"),
        (Order, Order(anything=nested(10_000)), "its Order cannot be written as JSON"),
        (Order, Order(anything=f"{CANARY}\ud800"), "its Order "),
        (Order, Order(data=CANARY.encode() + b"\xff"), "its Order cannot be written as JSON"),
        (Unwritable, Unwritable(text=CANARY), "its Unwritable cannot be written as JSON"),
        (Uncomputable, Uncomputable(text=CANARY), "its Uncomputable cannot be written as JSON"),
        (Order, Order(ratio=float("nan")), "does not come back from its journaled form"),
        (Order, number_holding(CANARY), "does not come back from its journaled form: .*number (int_parsing)"),
        (Order, stock_holding(CANARY), "does not come back from its journaled form: .*stock"),
        (Picky, Picky.model_construct(text=CANARY), "does not come back from its journaled form"),
    ],
    ids=range(16),
)
def test_what_cannot_be_journaled_is_refused_and_no_value_is_shown(
    model: type[BaseModel], value: Any, says: str
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(NotJournalable) as refused:
            dump_context(model, value)
    first, *rest = says.split(".*")
    assert first in str(refused.value)
    assert all(part in str(refused.value) for part in rest)
    assert CANARY not in str(refused.value)
    assert [str(warning.message) for warning in warned if CANARY in str(warning.message)] == []


def test_writing_a_context_warns_nobody() -> None:
    """Pydantic's warning about an unexpected value quotes it; where warnings are errors it would end the attempt."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NotJournalable):
            dump_context(Order, number_holding(CANARY))


def test_a_refusal_for_what_was_returned_does_not_quote_it_anywhere_in_its_traceback() -> None:
    with pytest.raises(NotJournalable) as refused:
        dump_context(Order, Order(data=CANARY.encode() + b"\xff"))
    assert CANARY not in whole(refused.value)


# -------------------------------------------------------------------- bytes that cannot be read


@pytest.mark.parametrize(
    ("model", "payload", "says"),
    [
        (Order, b"", "the context: unknown payload form empty; written by a newer version?"),
        (Order, b"\x02" + CANARY.encode(), "the context: unknown payload form 02; written by a newer version?"),
        (Order, b"{}", "the context: unknown payload form 7b"),
        (Order, b"\x01", "does not validate as Order: the whole (json_invalid)"),
        (Order, b"\x01" + CANARY.encode(), "does not validate as Order: the whole (json_invalid)"),
        (Order, b'\x01{"text":"' + CANARY.encode() + b'\xff"}', "does not validate as Order"),
        (Order, b'\x01["' + CANARY.encode() + b'"]', "does not validate as Order: the whole"),
        (Order, f'\x01{{"number":"{CANARY}"}}'.encode(), "does not validate as Order: number (int_parsing)"),
        (Order, f'\x01{{"stock":{{"{CANARY}":"x"}}}}'.encode(), "does not validate as Order: stock"),
        (Order, f'\x01{{"lines":[{{"count":"{CANARY}"}}]}}'.encode(), "lines.0.sku (missing), lines.0.count"),
        (Strict, f'\x01{{"{CANARY}":1}}'.encode(), "extra_forbidden"),
        (Picky, f'\x01{{"text":"{CANARY}"}}'.encode(), "does not validate as Picky"),
    ],
    ids=range(12),
)
def test_bytes_that_are_no_context_are_refused_and_no_part_of_them_is_shown(
    model: type[BaseModel], payload: bytes, says: str
) -> None:
    with pytest.raises(Unreadable) as refused:
        load_context(model, payload, "the context")
    assert says in str(refused.value)
    assert refused.value.what == "the context"
    assert CANARY not in whole(refused.value)


@pytest.mark.parametrize("form", [byte for byte in range(256) if byte != 1])
def test_every_form_but_the_known_one_is_refused(form: int) -> None:
    payload = bytes([form]) + b"{}"
    with pytest.raises(Unreadable, match=f"unknown payload form {form:02x}"):
        load_context(Order, payload, "the context")
    with pytest.raises(Unreadable, match=f"unknown payload form {form:02x}"):
        load_error(payload, "the error")


@given(st.binary(max_size=40) | st.binary(max_size=40).map(b"\x01".__add__))
def test_whatever_bytes_there_are_they_are_read_or_refused(payload: bytes) -> None:
    with contextlib.suppress(Unreadable):
        assert isinstance(load_context(Order, payload, "the context"), Order)
    with contextlib.suppress(Unreadable):
        assert isinstance(load_error(payload, "the error"), ErrorDetail)


def test_a_refusal_to_read_is_an_error_of_this_project_and_a_refusal_to_write_the_steps_own() -> None:
    assert issubclass(Unreadable, SagaError)
    assert not issubclass(NotJournalable, SagaError)


# -------------------------------------------------------------------- errors


class Declined(Exception):
    """An error of the application's own."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("even its message fails")


def raised(error: BaseException, *, depth: int = 1) -> BaseException:
    """`error` as something that was really raised, so many calls deep."""

    def call(left: int) -> None:
        if left:
            call(left - 1)
        raise error

    try:
        call(depth)
    except BaseException as caught:
        return caught
    raise AssertionError


def test_an_error_comes_back_with_type_message_and_traceback() -> None:
    detail = load_error(dump_error(raised(Declined("no funds"))), "the error")
    assert detail.type == f"{__name__}.Declined"
    assert detail.message == "no funds"
    assert detail.traceback.endswith(f"{__name__}.Declined: no funds\n")
    assert "in call\n" in detail.traceback


def test_a_builtin_is_named_without_its_module() -> None:
    assert load_error(dump_error(KeyError("sku")), "the error").type == "KeyError"


def test_a_cause_is_kept() -> None:
    error = Declined("no funds")
    error.__cause__ = TimeoutError("bank")
    assert "TimeoutError: bank" in load_error(dump_error(error), "the error").traceback


@pytest.mark.parametrize(
    "error",
    [
        Declined("x" * 10_000_000),
        Declined("\U0001f600" * 1_000_000),
        Declined("\x00" * 1_000_000),
        raised(Declined("deep"), depth=900),
        ExceptionGroup("many", [Declined("x" * 1_000)] * 1_000),
    ],
    ids=["long", "wide", "escaped", "deep", "many"],
)
def test_an_error_is_bounded_in_size(error: BaseException) -> None:
    payload = dump_error(error)
    detail = load_error(payload, "the error")
    assert len(detail.message) <= 4_000
    assert len(detail.traceback) <= 16_000
    assert len(payload) < 256 * 1024


def test_a_long_chain_of_causes_is_bounded_in_size() -> None:
    error = Declined("first")
    for number in range(200):
        following = Declined(f"{number}" * 100)
        following.__cause__ = error
        error = following
    assert len(dump_error(error)) < 64 * 1024


def test_what_is_cut_off_is_the_beginning_of_the_traceback() -> None:
    detail = load_error(dump_error(raised(Declined("deep"), depth=900)), "the error")
    assert detail.traceback.endswith("Declined: deep\n")


@pytest.mark.parametrize("message", ["\ud800 half a character", "\x00", "Größe", ""])
def test_any_message_can_be_kept(message: str) -> None:
    assert load_error(dump_error(Declined(message)), "the error").message == message


def test_an_error_that_cannot_say_what_it_is_can_be_kept() -> None:
    detail = load_error(dump_error(raised(Unprintable())), "the error")
    assert detail.type.endswith("Unprintable")


@pytest.mark.parametrize(
    "payload",
    [
        b"\x01",
        b"\x01" + CANARY.encode(),
        b"\x01\xff" + CANARY.encode(),
        json.dumps([CANARY]).encode(),
        b"\x01" + json.dumps([CANARY]).encode(),
        b"\x01" + json.dumps(CANARY).encode(),
        b"\x01" + json.dumps({CANARY: 1}).encode(),
        b"\x01" + json.dumps({"type": "KeyError"}).encode(),
        b"\x01" + json.dumps({"type": 1, "message": [CANARY]}).encode(),
    ],
)
def test_bytes_that_are_no_error_are_refused_and_no_part_of_them_is_shown(payload: bytes) -> None:
    with pytest.raises(Unreadable) as refused:
        load_error(payload, "run r, entry 3")
    assert str(refused.value).startswith("run r, entry 3: ")
    assert CANARY not in whole(refused.value)


# -------------------------------------------------------------------- the same context


class Array:
    """As numpy's: `==` gives an array, which is neither true nor false."""

    def __eq__(self, other: object) -> Any:
        return Array()

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


class Measured(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")

    weight: float = 1.0
    note: str = ""


class Sampled(BaseModel):
    note: str = ""
    _samples: Any = None

    def model_post_init(self, context: Any) -> None:
        self._samples = Array()


class Undecided(BaseModel):
    note: str = ""

    def __eq__(self, other: object) -> Any:
        return Array()

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "context", [Measured(weight=float("nan")), Measured(weight=float("inf")), Sampled(), Undecided()], ids=repr
)
def test_a_context_is_the_same_as_itself_whatever_its_types_say(context: BaseModel) -> None:
    payload, _ = dump_context(type(context), context)
    assert is_same_context(type(context), payload, payload)


@pytest.mark.parametrize("model", [Measured, Sampled, Undecided])
def test_contexts_of_which_nobody_says_that_they_are_equal_are_not_the_same(model: type[BaseModel]) -> None:
    one, other = (dump_context(model, model(note=note))[0] for note in ("one", "other"))
    assert not is_same_context(model, one, other)


def test_a_context_is_the_same_however_it_was_written() -> None:
    written, _ = dump_context(Measured, Measured(weight=2))
    assert is_same_context(Measured, b'\x01{"weight": 2}', written)
    assert not is_same_context(Measured, b'\x01{"weight": "heavy"}', written)
