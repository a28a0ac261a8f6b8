"""The committed form of the schema.

python -m sagas_store             write the files below the folder `schema`
python -m sagas_store --check     exit 1 and print the difference where they are out of date
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path

from sagas_store.schema import SCHEMA, SCHEMA_VERSION
from sagas_store.states import HELD, SETTLED, TRANSITIONS, State

__all__ = ["main", "picture", "rendered", "with_picture"]


def rendered() -> dict[str, str]:
    """The committed form: file name below `schema/` -> text."""
    files = {}
    for spec in SCHEMA:
        content = {
            "collection": spec.name,
            "version": SCHEMA_VERSION,
            "purpose": spec.purpose,
            "primary_key_serves": spec.primary_key_serves,
            "indexes": [
                {"name": i.name, "keys": i.keys, "unique": i.unique, "partial": i.partial, "serves": i.serves}
                for i in spec.indexes
            ],
            "validator": spec.validator,
        }
        files[f"v{SCHEMA_VERSION}/{spec.name}.json"] = json.dumps(content, indent=2) + "\n"
    return files


def picture() -> str:
    """The states as a Mermaid diagram: solid arrows for a worker's moves, dotted ones for a person's."""
    lines = ["```mermaid", "flowchart LR", "    start([start]) --> pending"]
    for group, states in (("held", HELD), ("settled", SETTLED)):
        lines += [f"    subgraph {group}", *(f"        {state}" for state in sorted(states)), "    end"]
    groups = {"held": HELD, "settled": SETTLED}
    for origin, targets in TRANSITIONS.items():
        whole = {name for name, states in groups.items() if states <= targets}
        single = {target for target in targets - {origin} if not any(target in groups[name] for name in whole)}
        arrow = "-->" if origin is State.RUNNING else "-.->"
        lines += [
            f"    {origin} {arrow if target is not State.RUNNING else '-->'} {target}"
            for target in sorted(whole | single)
        ]
    return "\n".join([*lines, "```"])


def with_picture(page: str) -> str:
    """The page with the picture between its marks renewed."""
    before, begin, rest = page.partition("<!-- picture: begin -->\n")
    _, end, after = rest.partition("<!-- picture: end -->")
    return f"{before}{begin}\n{picture()}\n\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Write or check the generated files; see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m sagas_store")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 where a file is out of date")
    options = parser.parse_args(arguments)
    page = Path("docs/stop.md")
    wanted = {Path("schema", name): text for name, text in rendered().items()}
    wanted[page] = with_picture(page.read_text())
    stale = False
    for path, text in wanted.items():
        current = path.read_text() if path.exists() else ""
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            continue
        difference = list(difflib.unified_diff(current.splitlines(), text.splitlines(), str(path), "code", lineterm=""))
        stale = stale or bool(difference)
        sys.stderr.writelines(line + "\n" for line in difference)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
