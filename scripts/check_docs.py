"""The docs are executed: what README.md and docs/ show is run, and what they name exists.

    python scripts/check_docs.py                  everything
    python scripts/check_docs.py docs/cli.md      run one page only
    python scripts/check_docs.py --no-run         only what needs no server: links, tests, commands, reference, paths
    python scripts/check_docs.py --write          write the reference of the public names anew, and nothing else

Each page runs in its own copy of the project, with a database of its own on a server that is started for the occasion.
How a block says what is to be done with it: scripts/_pages.py.
"""

import argparse
import ast
import contextlib
import keyword
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from pymongo import MongoClient

from sagas.cli import build_parser
from sagas_store.embedded import mongodb
from scripts import _reference as reference
from scripts._pages import Block, Page, anchors, programs, read_page

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 120  # seconds for one program or console block
QUICKSTART, QUICKSTART_LINES_MAX = "docs/examples/quickstart.py", 60
NORTHWIND = "tests/support/northwind.py"  # the one file that may look for data beside the checkout
OUTSIDE = re.compile(r"(?<![\w.-])/work/|\.\./shared")

TEST = re.compile(r"(?<![\w./-])tests/(?P<path>[\w./-]*)(?P<names>(?:::\w+)*)")
LOG_LINE = re.compile(r"`([a-z]+(?:,? [a-z]+)+)`")
LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?[^)]*\)|^\s*\[[^\]]+\]:\s*<?([^\s>]+)")

# Runs a program as __main__, among the files that its page has shown.
RUNNER = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
# What only whoever has this checkout, and stands in it, could import.
NOT_INSTALLED = re.compile(r"^\s*(?:from|import) (docs|scripts|tests)\b", re.MULTILINE)


# -- running -----------------------------------------------------------------------------------------------------------


def run_page(page: Page, *, uri: str) -> None:
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        copy = Path(folder, "project")
        copy.mkdir()
        for name in project_files():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        environment = {
            **os.environ,
            "SAGAS_MONGODB_URI": uri,
            "SAGAS_DATABASE": database(page),
            "SAGAS_VENV": sys.prefix,  # the project's scripts, run from the copy, use this environment as it is
            "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}",
            "NO_COLOR": "1",
        }
        for block, program in programs(page):
            if "file" in block.directives:
                target = copy / block.directives["file"]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(program)
            elif block.language == "python":
                script = Path(folder, Path(page.path).name)  # a traceback names the page, and the line on it
                script.write_text(program)
                run(page, block, [sys.executable, "-c", RUNNER, str(script)], copy, environment)
            elif block.language == "console":
                run(page, block, ["bash", "-euo", "pipefail", "-c", program], copy, environment)


def database(page: Page) -> str:
    return "docs_" + re.sub(r"\W+", "_", page.path.removesuffix(".md")).lower()


def run(page: Page, block: Block, command: list[str], folder: Path, environment: dict[str, str]) -> None:
    wanted = int(block.directives.get("exit", "0"))
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = f"exit code {process.wait(TIMEOUT)}"
        except subprocess.TimeoutExpired:
            status = f"not finished after {TIMEOUT} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # what a block started in the background ends with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status != f"exit code {wanted}":
            output.seek(0)
            page.problem(block.line, f"{status}\n{textwrap.indent(output.read().rstrip(), '    ')}")


# -- what the pages name -----------------------------------------------------------------------------------------------


def check_links(pages: dict[str, Page]) -> None:
    for page in pages.values():
        for number, line in page.prose:
            for match in LINK.finditer(re.sub(r"`[^`]*`", "``", line)):
                target = match[1] or match[2]
                if re.match(r"[a-z][a-z+.-]*:", target):
                    continue
                name, _, anchor = target.partition("#")
                path = os.path.normpath(Path(page.path).parent / name) if name else page.path
                if path.startswith("..") or not (ROOT / path).exists():
                    page.problem(number, f"{target} leads nowhere")
                elif anchor and path in pages and anchor not in anchors(pages[path]):
                    page.problem(number, f"{path} has no heading #{anchor}")


def check_same_as(page: Page) -> None:
    for block in page.blocks:
        source = block.directives.get("same-as")
        if source and not ((ROOT / source).is_file() and (ROOT / source).read_text() == block.text):
            page.problem(block.line, f"differs from {source}")
    if page.path == "README.md":
        quickstart = [block for block in page.blocks if block.directives.get("same-as") == QUICKSTART]
        if not quickstart:
            page.problem(1, f"shows no quickstart (a block marked `docs: same-as {QUICKSTART}`)")
        elif (length := quickstart[0].text.count("\n")) > QUICKSTART_LINES_MAX:
            page.problem(quickstart[0].line, f"the quickstart has {length} lines; {QUICKSTART_LINES_MAX} is the most")


def check_blocks(page: Page) -> None:
    """What only running would not find: here everything is importable, and a reader has the packages alone."""
    files: set[str] = set()
    for block in page.blocks:
        files |= {block.directives["file"]} if "file" in block.directives else set()
        if (before := block.directives.get("after")) is not None and before not in files:
            page.problem(block.line, f"goes on with {before}, which no block before it has shown")
        if block.language == "python" and (found := NOT_INSTALLED.search(block.text)):
            page.problem(block.line, f"imports from {found[1]}, which readers do not have")


def check_sagas(pages: dict[str, Page]) -> None:
    """Readers run page after page on one database, where a worker of one would take the runs of another for its own."""
    page_of: dict[str, str] = {}
    for page in pages.values():
        for block in page.blocks:
            for name in re.findall(r"\bSaga\(\"([\w-]+)\"", block.text) if block.language == "python" else ():
                if page_of.setdefault(name, page.path) != page.path:
                    page.problem(block.line, f"{page_of[name]} has a saga {name!r}, too")


def check_tests(page: Page) -> None:
    """A page that names a test as its proof must not outlive it: file or folder, and what stands behind `::`."""
    for number, line in page.lines():
        for match in TEST.finditer(line):
            path = "tests/" + match["path"].rstrip(".")  # the end of a sentence
            names = match["names"].split("::")[1:]
            if not (ROOT / path).exists():
                page.problem(number, f"there is no {path}")
            elif names and not (ROOT / path).is_file():
                page.problem(number, f"{path} is a folder and has no tests of its own")
            elif names:
                source = (ROOT / path).read_text()
                for name in names:
                    if not re.search(rf"^\s*(?:async def|def|class) {name}\b", source, re.MULTILINE):
                        page.problem(number, f"{path} has no {name}")


def check_log_lines(pages: dict[str, Page]) -> None:
    """Words in code marks that are neither a command nor Python are how a log line begins."""
    said = log_lines()
    for page in pages.values():
        for number, line in page.prose if page.path != "CHANGELOG.md" else ():
            for words in LOG_LINE.findall(line):
                first = words.split()[0]
                if first != "sagas" and not keyword.iskeyword(first) and not any(one.startswith(words) for one in said):
                    page.problem(number, f"no log line begins with {words!r}")


def log_lines() -> set[str]:
    """What the engine says, of whatever importance."""
    said = set()
    for path in (ROOT / "sagas").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="info" | "warning" | "error"), args=[ast.Constant(str(event)), *_]
                ):
                    said.add(event)
    return said


def check_glossary(page: Page) -> None:
    seen: dict[str, int] = {}
    for number, line in page.prose:
        if match := re.match(r"^\s*(?:[-*|]\s+)?\*\*(.+?)\*\*", line):
            term = match[1].strip(" .:").casefold()
            if term in seen:
                page.problem(number, f"{term!r} is already explained on line {seen[term]}")
            seen.setdefault(term, number)


def check_command_line(page: Page, parser: argparse.ArgumentParser) -> None:
    """A heading names each command and below it stand its options; what stands above all of them is common to them."""
    commands = dict(walk(parser, parser.prog))
    common = commands.pop(parser.prog)
    named = {command: re.compile(rf"(?<![\w-]){re.escape(command)}(?![\w-])") for command in commands}
    headings = {number: heading for number, _, heading in page.headings()}
    sections, current = {"": ""}, [""]
    for number, line in page.lines():
        if number in headings:
            current = [command for command in commands if named[command].search(headings[number])] or current
        for command in current:
            sections[command] = sections.get(command, "") + line + "\n"
    for command, options in {"": common, **commands}.items():
        if command not in sections:
            page.problem(1, f"no heading names `{command}`")
            continue
        documented = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", sections[command] + sections.get("", "")))
        for option in sorted(options - documented):
            page.problem(1, f"`{command or parser.prog}` has {option}, which is not explained")
    known = common.union({"--help"}, *commands.values())
    for number, line in page.prose:
        for option in set(re.findall(r"(?<![\w-])--[a-z][\w-]*", line)) - known:
            page.problem(number, f"no command has {option}")


def walk(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, set[str]]]:
    options: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from walk(command, f"{name} {word}")
        elif "--help" not in action.option_strings:
            options.update(option for option in action.option_strings if option.startswith("--"))
    yield name, options


def check_paths() -> list[str]:
    """The project must work wherever it lies: no file names a place outside of it."""
    problems = []
    for name in project_files():
        for number, line in enumerate((ROOT / name).read_text(errors="replace").splitlines(), start=1):
            if name not in {NORTHWIND, "scripts/check_docs.py"} and OUTSIDE.search(line):
                problems.append(f"{name}:{number}: names a path outside the project: {line.strip()[:100]}")
    return problems


def project_files() -> list[str]:
    """What git knows or would add; where there is no git (an unpacked release), what does not look like a leftover."""
    try:
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (FileNotFoundError, subprocess.CalledProcessError):
        names = []
        for folder, inner, files in os.walk(ROOT):
            inner[:] = [name for name in inner if not re.fullmatch(r"\.(?!ci$).*|__pycache__|dist", name)]
            names += [os.path.relpath(Path(folder, name), ROOT) for name in files]
    return sorted(name for name in names if (ROOT / name).is_file())


def run_all(pages: Iterable[Page]) -> None:
    """Run each page's programs in a database of its own."""
    with mongodb() as uri, MongoClient[dict[str, object]](uri) as client:
        if not os.environ.get("SAGAS_MONGODB_URI"):
            # Ours: what a killed worker had begun in a transaction keeps its successor waiting a minute by default.
            client.admin.command("setParameter", 1, transactionLifetimeLimitSeconds=3)
        for page in pages:
            print(f"running {page.path}", flush=True)
            client.drop_database(database(page))
            run_page(page, uri=uri)


def main() -> int:
    arguments = argparse.ArgumentParser(description="Check and run the docs.")
    arguments.add_argument("pages", nargs="*", metavar="PAGE", help="run only this page (README.md, docs/cli.md ...)")
    arguments.add_argument("--no-run", action="store_true", help="only what needs no server")
    arguments.add_argument("--write", action="store_true", help="write the generated reference, and check nothing")
    options = arguments.parse_args()

    if options.write:
        written = ROOT / reference.PAGE
        written.write_text(reference.renewed(written.read_text()))
        return 0
    names = [name for name in project_files() if re.fullmatch(r"[^/]+\.md|docs/.*\.md", name)]
    pages = {name: read_page(name, (ROOT / name).read_text()) for name in names}
    check_links(pages)
    check_sagas(pages)
    check_log_lines(pages)
    for page in pages.values():
        check_same_as(page)
        check_blocks(page)
        check_tests(page)
    if "docs/glossary.md" in pages:
        check_glossary(pages["docs/glossary.md"])
    if reference.PAGE in pages:
        for problem in reference.problems((ROOT / reference.PAGE).read_text()):
            pages[reference.PAGE].problem(1, problem)
    if "docs/cli.md" in pages:
        check_command_line(pages["docs/cli.md"], build_parser())

    if unknown := set(options.pages) - set(names):
        arguments.error(f"no such page: {', '.join(sorted(unknown))}")
    wanted = [pages[name] for name in options.pages or names if name == "README.md" or name.startswith("docs/")]
    wanted = [page for page in wanted if any(True for _ in programs(page))]
    if wanted and not options.no_run:
        run_all(wanted)

    problems = [problem for page in pages.values() for problem in page.problems] + check_paths()
    print("\n".join(problems) or f"{len(pages)} pages are as they should be")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
