"""The reference of the public names, written from the code: signatures, docstrings, fields, members.

A page says which names stand where, between two marks; everything between them is generated:

    <!-- reference: Client Run Keyring[create,rotate] sagas.wrapping:add_master_key -->
    <!-- reference: end -->

A name that stands alone is one of `sagas`; any other is given with its module. Every name of `sagas` is on the page,
once.

Of a class there is how it is made (where that has a docstring), its docstring, its fields or members with theirs, its
attributes that have one, and its public methods. Where some are named in brackets there are only those, and only fields
that have a docstring: the rest is the engine's. Errors of the one tree come as rows of a table.
"""

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import json
import re
import textwrap
import typing
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import sagas

PAGE = "docs/api.md"
MARK = re.compile(
    r"(?P<begin><!-- reference: (?P<names>(?!end)[^>]+?) -->\n)(?P<text>.*?)(?P<end><!-- reference: end -->)", re.DOTALL
)
NAME = re.compile(r"(?:(?P<module>[\w.]+):)?(?P<name>\w+)(?:\[(?P<only>[\w,]*)\])?")
DURATION = re.compile(r"DurationField\[(.+)\]")
WIDTH = 110


def renewed(page: str) -> str:
    """The page with what stands between its marks written anew. Raises LookupError for a name that does not exist."""
    return MARK.sub(lambda mark: f"{mark['begin']}\n{_written(mark['names'].split())}\n{mark['end']}", page)


def problems(page: str) -> list[str]:
    """What is wrong with a page that should be the reference: names left out, told twice, or out of date."""
    named = [name["name"] for mark in MARK.finditer(page) for name in NAME.finditer(mark["names"])]
    found = [f"{name} is in sagas.__all__ and not here" for name in sagas.__all__ if name not in named]
    found += [f"{name} is here more than once" for name in sorted({name for name in named if named.count(name) > 1})]
    try:
        stale = renewed(page) != page
    except LookupError as error:
        return [*found, str(error)]
    return found + ["is not what the code says: python scripts/check_docs.py --write"] * stale


def _written(names: list[str]) -> str:
    parts: list[str] = []
    errors: list[type[BaseException]] = []
    for given in names:
        name = NAME.fullmatch(given)
        if name is None:
            raise LookupError(f"{given} is not a name, or has a wrong bracket")
        found = _lookup(name["module"], name["name"])
        if isinstance(found, type) and issubclass(found, sagas.SagaError):
            errors.append(found)
        else:
            only = name["only"].split(",") if name["only"] is not None else None
            parts += [_heading(name["module"], name["name"]), *_entry(found, only)]
    if errors:
        parts.append(_table(("raised", "when", "carries"), map(_error_row, errors)))
    return "\n".join(parts)


def _lookup(module: str | None, name: str) -> Any:
    if module is None and name not in sagas.__all__:
        raise LookupError(f"sagas has no public {name}")
    found = getattr(importlib.import_module(module or "sagas"), name, None)
    if found is None:
        raise LookupError(f"{module} has no {name}")
    return found


def _heading(module: str | None, name: str) -> str:
    return f"### `{name}`\n" + (f"\n`from {module} import {name}`\n" if module is not None else "")


def _entry(found: Any, only: list[str] | None) -> Iterator[str]:
    if isinstance(found, frozenset):
        yield ", ".join(f"`{member}`" for member in sorted(found)) + "\n"
    elif isinstance(found, type) and issubclass(found, enum.Enum):
        documented = _documented_names(found)
        rows = [(f"`{each.name}`", f"`{each.value}`", documented.get(each.name, "")) for each in found]
        yield from (_text(found), _table(("member", "stored as", "meaning"), rows))
    elif isinstance(found, type):
        yield from _class(found, only)
    else:
        yield from (_signatures(found), _text(found))


def _class(found: type, only: list[str] | None) -> Iterator[str]:
    fields = dataclasses.is_dataclass(found)
    made = None if fields else vars(found).get("__init__")
    if made is not None and (made.__doc__ or issubclass(found, BaseException)):
        yield _signatures(made, name=found.__name__)
    yield _text(found)
    if made is not None and made.__doc__:
        yield _text(made)
    if fields and (table := _fields(found, documented=only is not None)):
        yield table
    public = {
        name: member
        for name, member in vars(found).items()
        if (not name.startswith("_") or name == "__call__") and (only is None or name in only)
    }
    if missing := set(only or ()) - set(public) - {""}:
        raise LookupError(f"{found.__name__} has no {', '.join(sorted(missing))}")
    properties = {name: _getter(member) for name, member in public.items() if _getter(member) is not None}
    rows = [(name, "", text) for name, text in _documented_attributes(made).items()]
    rows += [
        (name, _annotation(inspect.signature(get).return_annotation), _text(get)) for name, get in properties.items()
    ]
    if rows:
        yield _table(("attribute", "type", "meaning"), [(f"`{name}`", _code(kind), text) for name, kind, text in rows])
    for name, member in public.items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if inspect.isfunction(function):
            yield f"#### `{found.__name__}.{name}`\n\n{_signatures(function)}\n{_text(function)}"


def _getter(member: Any) -> Any:
    if isinstance(member, functools.cached_property):
        return member.func
    return member.fget if isinstance(member, property) else None


def _text(found: Any) -> str:
    return inspect.cleandoc(found.__doc__ or "") + "\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _block(code: str) -> str:
    return f"```py\n{code}\n```\n"  # not "python": it is nothing to be run


# -- signatures ----------------------------------------------------------------------------------------------------


def _signatures(function: Any, *, name: str | None = None) -> str:
    """How it is called: as it is declared, or each of its overloads."""
    forms = typing.get_overloads(function) or [function]
    return _block("\n".join(signature(form, name=name) for form in forms))


def signature(function: Any, *, name: str | None = None) -> str:
    """One signature, without `self`, in one line or a line for each parameter."""
    shape = inspect.signature(function)
    parameters = [each for each in shape.parameters.values() if each.name not in {"self", "cls"}]
    shown: list[str] = []
    for before, each in zip([None, *parameters], parameters, strict=False):
        if before is not None and before.kind is each.POSITIONAL_ONLY and each.kind is not each.POSITIONAL_ONLY:
            shown.append("/")
        if each.kind is each.KEYWORD_ONLY and (
            before is None or before.kind not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        ):
            shown.append("*")
        star = "*" * ((each.kind is each.VAR_POSITIONAL) + 2 * (each.kind is each.VAR_KEYWORD))
        typed = "" if each.annotation is each.empty else f": {_annotation(each.annotation)}"
        equals = " = " if typed else "="
        shown.append(
            f"{star}{each.name}{typed}" + ("" if each.default is each.empty else equals + _value(each.default))
        )
    if parameters and parameters[-1].kind is inspect.Parameter.POSITIONAL_ONLY:
        shown.append("/")
    made = name is not None
    begin = name if made else ("async def " if inspect.iscoroutinefunction(function) else "def ") + function.__name__
    returned = "" if made or shape.return_annotation is shape.empty else f" -> {_annotation(shape.return_annotation)}"
    line = f"{begin}({', '.join(shown)}){returned}"
    if len(line) <= WIDTH:
        return line
    return f"{begin}(\n" + "".join(f"    {each},\n" for each in shown) + f"){returned}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _value(value: Any) -> str:
    """A default as one would write it."""
    for group in ("HELD", "OPEN", "SETTLED"):
        if value == getattr(sagas, group):
            return group
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, frozenset):
        return "{" + ", ".join(map(_value, sorted(value))) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_value, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, timedelta):
        return _duration(value)
    return json.dumps(value) if isinstance(value, str) else getattr(value, "__name__", None) or repr(value)


def _duration(value: timedelta) -> str:
    for unit in ("days", "hours", "minutes", "seconds"):
        if not value % timedelta(**{unit: 1}):
            return f"timedelta({unit}={value // timedelta(**{unit: 1})})"
    return f"timedelta(milliseconds={value // timedelta(milliseconds=1)})"


# -- tables ------------------------------------------------------------------------------------------------------------


def _fields(found: Any, *, documented: bool) -> str:
    texts, defaults = _documented_names(found), _defaults(found)
    shown = [each for each in dataclasses.fields(found) if each.name in texts or not documented]
    rows = [
        (
            _code(each.name),
            _code(_given(_annotation(each.type))),
            _code(defaults.get(each.name, "")),
            texts.get(each.name, ""),
        )
        for each in shown
    ]
    if not any(default for _, _, default, _ in rows):
        return _table(("field", "type", "meaning"), [(name, kind, text) for name, kind, _, text in rows])
    return _table(("field", "type", "default", "meaning"), rows)


def _given(annotation: str) -> str:
    """What a field may be given: for a duration seconds, too."""
    return DURATION.sub(lambda field: field[1].replace("timedelta", "timedelta | float"), annotation)


def _error_row(error: type[BaseException]) -> tuple[str, str, str]:
    bases = [base for base in reversed(error.__mro__) if issubclass(base, sagas.SagaError) and "__init__" in vars(base)]
    carried = [name for base in bases for name in _assigned(base)]
    return f"`{error.__name__}`", _text(error), ", ".join(f"`{name}`" for name in carried)


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    """In one line; a bar would end the cell, also in a type."""
    return " ".join(text.split()).replace("|", "\\|")


# -- what only the source tells ----------------------------------------------------------------------------------------


def _body(found: Any) -> list[ast.stmt]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    assert isinstance(tree, ast.ClassDef | ast.FunctionDef), found
    return tree.body


def _with_text(body: list[ast.stmt]) -> Iterator[tuple[ast.expr, str]]:
    """What is assigned and has a docstring below it."""
    for statement, after in itertools.pairwise(body):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            if isinstance(statement, ast.Assign):
                yield statement.targets[0], inspect.cleandoc(after.value.value)
            elif isinstance(statement, ast.AnnAssign):
                yield statement.target, inspect.cleandoc(after.value.value)


def _documented_names(found: Any) -> dict[str, str]:
    return {target.id: text for target, text in _with_text(_body(found)) if isinstance(target, ast.Name)}


def _documented_attributes(made: Any) -> dict[str, str]:
    documented = _with_text(_body(made)) if inspect.isfunction(made) else ()
    names = {target.attr: text for target, text in documented if isinstance(target, ast.Attribute)}
    return {name: text for name, text in names.items() if not name.startswith("_")}


def _assigned(found: type) -> Iterator[str]:
    for statement in _body(vars(found)["__init__"]):
        for target in statement.targets if isinstance(statement, ast.Assign) else ():
            if isinstance(target, ast.Attribute) and not target.attr.startswith("_"):
                yield target.attr


def _defaults(found: type) -> dict[str, str]:
    """Of a dataclass, as they are written there."""
    defaults: dict[str, str] = {}
    for statement in _body(found):
        if (
            isinstance(statement, ast.AnnAssign)
            and statement.value is not None
            and isinstance(statement.target, ast.Name)
        ):
            defaults[statement.target.id] = _written_default(statement.value)
    return defaults


def _written_default(value: ast.expr) -> str:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        given = {each.arg: each.value for each in value.keywords}
        if "default_factory" in given:
            return f"{ast.unparse(given['default_factory'])}()"
        return ast.unparse(given["default"]) if "default" in given else ""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "DurationField":
        return ast.unparse(value.args[0])
    return (
        json.dumps(value.value)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
        else ast.unparse(value)
    )
