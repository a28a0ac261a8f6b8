"""The committed form of the schema.

python -m sagas_store schema             write the files below the folder `schema`
python -m sagas_store schema --check     exit 1 and print the difference where they are out of date
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path

from sagas_store.schema import SCHEMA, SCHEMA_VERSION

__all__ = ["main", "rendered"]


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
                {"name": i.name, "keys": i.keys, "partial": i.partial, "serves": i.serves} for i in spec.indexes
            ],
            "validator": spec.validator,
        }
        files[f"v{SCHEMA_VERSION}/{spec.name}.json"] = json.dumps(content, indent=2) + "\n"
    return files


def main(arguments: list[str] | None = None) -> int:
    """Write or check the generated files; see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m sagas_store")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 where a file is out of date")
    options = parser.parse_args(arguments)
    stale = False
    for name, text in rendered().items():
        path = options.folder / name
        if options.check:
            current = path.read_text() if path.exists() else ""
            difference = list(
                difflib.unified_diff(current.splitlines(), text.splitlines(), str(path), "code", lineterm="")
            )
            stale = stale or bool(difference)
            sys.stderr.writelines(line + "\n" for line in difference)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
