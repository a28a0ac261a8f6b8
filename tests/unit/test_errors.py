"""The trees of errors, as the modules that have them draw them, are what Python makes of the classes."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest

import sagas.errors
import sagas_store.errors
from sagas.lease import LeaseLapsed

_DRAWN = re.compile(r"^    ((?:[│ ]   )*)(?:[├└]── )?(\w+)(?:  +\S.*)?$")
"""A line of a tree: its depth in columns of four, the name, and what is said of it."""


def drawn(module: ModuleType) -> list[tuple[str, str | None]]:
    """Each name of the first tree in a module's docstring, with the one it hangs from."""
    assert module.__doc__ is not None
    lines = module.__doc__.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.strip().split("  ")[0] == "SagaError")
    above: list[str] = []
    found: list[tuple[str, str | None]] = []
    for line in lines[begin : lines.index("", begin)]:
        match = _DRAWN.match(line)
        assert match is not None, line
        depth = len(match[1]) // 4 + ("── " in line)
        del above[depth:]
        found.append((match[2], above[-1] if above else None))
        above.append(match[2])
    return found


@pytest.mark.parametrize("module", [sagas.errors, sagas_store.errors], ids=lambda module: module.__name__)
def test_the_tree_of_errors_is_drawn_as_it_is(module: ModuleType) -> None:
    classes = {name: one for name, one in vars(module).items() if inspect.isclass(one)} | {"LeaseLapsed": LeaseLapsed}
    tree = drawn(module)
    names = [name for name, _ in tree]
    assert sorted(set(names)) == sorted(names), "drawn twice"
    own = {
        name
        for name, one in classes.items()
        if one.__module__ == module.__name__ and issubclass(one, sagas.errors.SagaError)
    }
    assert own <= set(names), "not drawn"
    for name, parent in tree:
        bases = [base.__name__ for base in classes[name].__mro__[1:] if base.__name__ in names]
        assert (bases[0] if bases else None) == parent, name
