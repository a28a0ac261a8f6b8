"""The check of the docs finds what it is there to find."""

import argparse
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from scripts import check_docs
from scripts._pages import Page, anchors, programs, read_page


def page(text: str, path: str = "docs/page.md") -> Page:
    return read_page(path, textwrap.dedent(text).strip() + "\n")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project beside this one, to be checked in its place."""
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    return tmp_path


def run_page(text: str) -> list[str]:
    shown = page(text)
    check_docs.run_page(shown, uri="mongodb://nobody.invalid")
    return shown.problems


def test_a_program_keeps_the_line_numbers_of_its_page() -> None:
    shown = page("""
        # Title

        Text.

        ```python
        first = 1
        ```
    """)
    ((_, program),) = programs(shown)
    assert program.splitlines()[5] == "first = 1"
    assert not shown.problems


def test_a_part_of_a_program_runs_at_the_end_of_the_file_it_belongs_to(project: Path) -> None:
    text = """
        <!-- docs: file shop.py -->
        ```python
        stock = ["tea"]
        ```

        <!-- docs: after shop.py -->
        ```python
        stock.append("coffee")
        assert stock == ["tea", "coffee"], stock
        ```

        ```python
        from shop import stock

        assert stock == ["tea"], stock
        ```
    """
    assert not run_page(text)
    assert "ImportError" in run_page(text.replace("import stock", "import gone"))[0]


def test_a_part_of_a_file_that_was_not_shown_is_reported() -> None:
    shown = page("<!-- docs: after shop.py -->\n```python\n```\n<!-- docs: file shop.py -->\n```python\n```")
    check_docs.check_blocks(shown)
    assert shown.problems == ["docs/page.md:3: goes on with shop.py, which no block before it has shown"]


def test_a_program_is_one_that_python_runs(project: Path) -> None:
    (problem,) = run_page("```python\nimport asyncio\nawait asyncio.sleep(0)\n```")
    assert "SyntaxError" in problem


def test_an_import_that_only_a_checkout_has_is_reported() -> None:
    shown = page(
        "```python\nfrom docs.examples import shop\nimport docstrings\n```\n```python\nimport tests.support\n```"
    )
    check_docs.check_blocks(shown)
    assert shown.problems == [
        "docs/page.md:2: imports from docs, which readers do not have",
        "docs/page.md:6: imports from tests, which readers do not have",
    ]


def test_two_pages_with_a_saga_of_one_name_are_reported() -> None:
    text = '```python\nOrders = Saga("order", Order)\nagain = Saga("order", Order, version=2)\n```'
    first, second = page(text, "docs/a.md"), page(text, "docs/b.md")
    check_docs.check_sagas({each.path: each for each in (first, second)})
    assert not first.problems
    assert second.problems == ["docs/b.md:2: docs/a.md has a saga 'order', too"] * 2


def test_every_block_starts_afresh() -> None:
    shown = page("""
        ```python
        one = 1
        ```
        ```python
        two = 2
        ```
    """)
    assert [program.split() for _, program in programs(shown)] == [["one", "=", "1"], ["two", "=", "2"]]


def test_only_the_prompted_lines_of_a_console_block_are_run() -> None:
    shown = page("""
        ```console
        $ echo one \\
        >   two
        one two
        $ true
        ```
    """)
    assert [program for _, program in programs(shown)] == ["echo one \\\n  two\ntrue"]


def test_a_skipped_block_is_not_run_and_needs_a_reason() -> None:
    with_reason = page("<!-- docs: skip (needs a cluster) -->\n```python\n1/0\n```")
    without = page("<!-- docs: skip -->\n```python\n1/0\n```")
    assert not list(programs(with_reason))
    assert not with_reason.problems
    assert "not understood" in without.problems[0]


@pytest.mark.parametrize("comment", ["<!-- docs: skpi (reason) -->", "<!-- docs: after -->"])
def test_a_comment_with_a_typing_error_is_reported(comment: str) -> None:
    assert "not understood" in page(f"{comment}\n```python\n```").problems[0]


def test_a_comment_away_from_its_block_is_reported() -> None:
    assert "right above its block" in page("<!-- docs: after a.py -->\n\n```python\n```").problems[0]


def test_a_block_that_is_never_closed_is_reported() -> None:
    assert page("text\n```python\n1/0").problems == ["docs/page.md:2: this block is never closed"]


def test_a_failing_program_is_reported_with_the_line_of_the_page(project: Path) -> None:
    (problem,) = run_page("""
        Text.

        ```python
        import asyncio

        raise LookupError("gone")
        ```
    """)
    assert problem.startswith("docs/page.md:4: exit code 1")
    assert 'page.md", line 6' in problem
    assert "LookupError: gone" in problem


def test_a_program_must_import_what_it_uses(project: Path) -> None:
    (problem,) = run_page("```python\nprint(sys.argv)\n```")
    assert "NameError" in problem


def test_commands_see_the_files_the_page_has_shown_and_its_own_database(project: Path) -> None:
    assert not run_page("""
        <!-- docs: file app/settings.toml -->
        ```toml
        answer = 42
        ```
        ```console
        $ grep -q 42 app/settings.toml
        $ test $SAGAS_DATABASE = docs_docs_page
        $ test $SAGAS_MONGODB_URI = mongodb://nobody.invalid
        ```
    """)


def test_a_command_that_fails_is_reported_unless_the_page_says_so(project: Path) -> None:
    failing = "```console\n$ false\n$ echo never\n```"
    (problem,) = run_page(failing)
    assert "exit code 1" in problem
    assert "never" not in problem
    assert not run_page(f"<!-- docs: exit 1 -->\n{failing}")


def test_what_a_block_starts_in_the_background_ends_with_it(project: Path) -> None:
    (problem,) = run_page("```console\n$ sleep 1000 &\n$ echo process $!\n$ exit 7\n```")
    number = int(problem.split("process ")[1])
    deadline = time.monotonic() + 10
    while psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "still running"
        time.sleep(0.01)  # the kill is sent, the kernel takes its moment


def test_a_dead_link_and_a_dead_anchor_are_reported(project: Path) -> None:
    for name in ("docs/page.md", "docs/other.md"):
        (project / name).touch()
    shown = page("""
        # Two words & `more`
        [fine](other.md), [fine](#two-words--more), [elsewhere](https://example.org), `[code](no.md)`
        [dead](gone.md)
        [outside](../../secret.md)
        [dead](other.md#gone)
    """)
    other = read_page("docs/other.md", "# Here\n# Here\n")
    check_docs.check_links({shown.path: shown, other.path: other})
    assert anchors(other) == {"here", "here-1"}
    assert [problem.split(":")[1] for problem in shown.problems] == ["3", "4", "5"]


def test_a_test_that_a_page_names_must_exist(project: Path) -> None:
    (project / "tests/unit").mkdir(parents=True)
    source = "def test_one(): ...\n\nclass TestTwo:\n    async def test_three(self): ...\n"
    (project / "tests/unit/test_it.py").write_text(source)
    shown = page("""
        Proved by `tests/unit/`, tests/unit/test_it.py. And `tests/unit/test_it.py::test_one`,
        `tests/unit/test_it.py::TestTwo::test_three`; [elsewhere](https://example.org/tests/gone.py), my_tests/gone.py.

        ```console
        $ scripts/test tests/unit -k one
        $ scripts/test tests/gone
        ```
        | a guarantee | `tests/unit/test_gone.py` |
        | another | `tests/unit/test_it.py::test_on`, `tests/unit/test_it.py::TestTwo::test_one_two` |
        And `tests/unit::test_one`.
    """)
    check_docs.check_tests(shown)
    assert [problem.removeprefix("docs/page.md:") for problem in shown.problems] == [
        "6: there is no tests/gone",
        "8: there is no tests/unit/test_gone.py",
        "9: tests/unit/test_it.py has no test_on",
        "9: tests/unit/test_it.py has no test_one_two",
        "10: tests/unit is a folder and has no tests of its own",
    ]


def test_a_log_line_that_nobody_writes_is_reported(project: Path) -> None:
    (project / "sagas").mkdir()
    (project / "sagas/worker.py").write_text(
        'log.warning("claim failed, trying again", error=1)\nlog.bind("nobody says it")'
    )
    shown = page("""
        The log says `claim failed`, or `claim failed, trying again`; see `sagas runs`, `from store`, `held`.
        It does not say `claim given up`,
        nor `nobody says it`.
    """)
    check_docs.check_log_lines({shown.path: shown})
    assert [problem.removeprefix("docs/page.md:") for problem in shown.problems] == [
        "2: no log line begins with 'claim given up'",
        "3: no log line begins with 'nobody says it'",
    ]


def test_the_readme_shows_the_quickstart_to_the_letter(project: Path) -> None:
    (project / "docs/examples").mkdir()
    (project / check_docs.QUICKSTART).write_text("print(1)\n")
    shown = f"<!-- docs: same-as {check_docs.QUICKSTART} -->\n```python\nprint({{}})\n```"
    equal, different, without = (page(text, "README.md") for text in (shown.format(1), shown.format(2), "# Title"))
    for readme in (equal, different, without):
        check_docs.check_same_as(readme)
    assert equal.problems == []
    assert different.problems == [f"README.md:3: differs from {check_docs.QUICKSTART}"]
    assert "shows no quickstart" in without.problems[0]


def test_a_quickstart_too_long_to_be_quick_is_reported(project: Path) -> None:
    (project / "docs/examples").mkdir()
    source = "1\n" * 61
    (project / check_docs.QUICKSTART).write_text(source)
    readme = page(f"<!-- docs: same-as {check_docs.QUICKSTART} -->\n```python\n{source}```", "README.md")
    check_docs.check_same_as(readme)
    assert readme.problems == ["README.md:3: the quickstart has 61 lines; 60 is the most"]


def test_a_term_is_explained_once() -> None:
    shown = page("**Lease** - a promise.\n\n**lease** - again.\n\ntext with **lease** inside")
    check_docs.check_glossary(shown)
    assert shown.problems == ["docs/page.md:3: 'lease' is already explained on line 1"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="sagas")
    made.add_argument("--database")
    commands = made.add_subparsers()
    commands.add_parser("runs").add_argument("--json", action="store_true")
    schema = commands.add_parser("schema").add_subparsers()
    schema.add_parser("apply").add_argument("--dry-run", action="store_true")
    return made


def test_every_command_and_option_must_be_explained() -> None:
    complete = page("""
        All take `--database`.
        ## `sagas runs`
        `--json` for programs.
        ## `sagas schema apply`
        `--dry-run` only says what it would do.
    """)
    check_docs.check_command_line(complete, parser())
    assert not complete.problems

    lacking = page("""
        ## `sagas runs`
        Also with `--jsn`. Not here: `--dry-run`.
        ## `sagas schema`
    """)
    check_docs.check_command_line(lacking, parser())
    assert sorted(lacking.problems) == [
        "docs/page.md:1: `sagas runs` has --json, which is not explained",
        "docs/page.md:1: `sagas` has --database, which is not explained",
        "docs/page.md:1: no heading names `sagas schema apply`",
        "docs/page.md:2: no command has --jsn",
    ]


@pytest.mark.parametrize("outside", ["/wo" + "rk/data", "../sha" + "red/data"])
def test_a_path_outside_the_project_is_reported(project: Path, outside: str) -> None:
    (project / "docs/fine.md").write_text("net/work/data and ../docs")
    (project / "docs/page.md").write_text(f"see {outside}")
    (problem,) = check_docs.check_paths()
    assert problem.startswith("docs/page.md:1: names a path outside the project")


def test_the_static_part_runs_as_a_command(project: Path) -> None:
    script = Path(check_docs.__file__)
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--no-run" in shown.stdout
