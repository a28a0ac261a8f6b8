"""What a page of the docs consists of: its blocks, what each is for, and the prose around them.

- a `python` block is a program, which a reader can save and run: it stands for itself, and imports nothing of this
  checkout that is not installed with the packages;
- of a `console` block the lines that begin with `$ ` are one bash script, which must succeed.

Comments on the lines right above a block say otherwise. What is not listed here is an error:

    <!-- docs: skip (reason) -->      shown, not run
    <!-- docs: file NAME -->          not run but written to that file, for the blocks after it
    <!-- docs: after NAME -->         a part of a program: runs as if it stood at the end of that file, shown before it
    <!-- docs: exit N -->             the block ends with that exit code
    <!-- docs: same-as PATH -->       equals that file, to the letter
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
DIRECTIVE = re.compile(r"^\s*<!--\s*docs:\s*(?P<verb>[\w-]+)\s*(?P<argument>.*?)\s*-->\s*$")
VERBS = frozenset({"skip", "file", "after", "exit", "same-as"})


@dataclass(frozen=True)
class Block:
    line: int  # of the first line inside the fence, counted from 1
    language: str
    text: str
    directives: dict[str, str]


@dataclass
class Page:
    path: str  # from the root of the project
    blocks: list[Block] = field(default_factory=list)
    prose: list[tuple[int, str]] = field(default_factory=list)  # numbered lines outside of fences
    problems: list[str] = field(default_factory=list)

    def problem(self, line: int, message: str) -> None:
        self.problems.append(f"{self.path}:{line}: {message}")

    def lines(self) -> list[tuple[int, str]]:
        inside = [(b.line + n, line) for b in self.blocks for n, line in enumerate(b.text.splitlines())]
        return sorted([*self.prose, *inside])

    def headings(self) -> Iterator[tuple[int, int, str]]:
        """Line number, level and text of each heading."""
        for number, line in self.prose:
            if match := re.match(r"^(#{1,6})\s+(.*?)\s*#*$", line):
                yield number, len(match[1]), match[2]


def read_page(path: str, text: str) -> Page:
    page = Page(path)
    lines = text.splitlines()
    directives: dict[str, str] = {}
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if match := FENCE.match(line):
            end = re.compile(rf"^\s*{match['fence'][0]}{{{len(match['fence'])},}}\s*$")
            length = next((n for n, inner in enumerate(lines[number:]) if end.match(inner)), None)
            if length is None:
                page.problem(number, "this block is never closed")
                break
            inside = textwrap.dedent("\n".join(lines[number : number + length])) + "\n"
            page.blocks.append(Block(number + 1, match["language"], inside, directives))
            number += length + 1
            directives = {}
        elif match := DIRECTIVE.match(line):
            if match["verb"] not in VERBS or not match["argument"]:
                page.problem(number, f"not understood: {line.strip()}")
            directives = {**directives, match["verb"]: match["argument"]}
        else:
            if directives:
                page.problem(number, "a docs comment must stand right above its block")
            directives = {}
            page.prose.append((number, line))
    return page


def programs(page: Page) -> Iterator[tuple[Block, str]]:
    """The blocks to be acted on, in order, each with what to run or to write."""
    files: dict[str, str] = {}
    for block in page.blocks:
        if "skip" in block.directives:
            continue
        if name := block.directives.get("file"):
            files[name] = block.text
            yield block, block.text
        elif block.language == "console":
            yield block, commands(block)
        elif block.language == "python":
            before = files.get(block.directives.get("after", ""), "")
            # Lines keep the page's numbers, where there is room for what stands before them.
            yield block, before + "\n" * (block.line - 1 - before.count("\n")) + block.text


def commands(block: Block) -> str:
    """The lines that begin with `$ `, each with the lines it is continued on."""
    found: list[str] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append(line[2:])
        elif found and found[-1].endswith("\\"):
            found.append(line.removeprefix("> "))
    return "\n".join(found)


def anchors(page: Page) -> set[str]:
    """What a heading may be linked by, as GitHub makes it."""
    found: set[str] = set()
    for _, _, heading in page.headings():
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        plain = slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = 0
        while slug in found:
            number += 1
            slug = f"{plain}-{number}"
        found.add(slug)
    return found | {name for _, line in page.prose for name in re.findall(r"<a (?:id|name)=\"([^\"]+)\"", line)}
