"""The rules of the house: which room may import which, and that all is there and used. Read from sources, nothing runs.

A house is a folder with scripts/, notebooks/ and tests/. Every rule returns one sentence per breach, with its remedy.

    distmuon    launch < sharding < optim < extras < models < verify < public names in __init__
    muon_conformance: a kit for anybody's Muon, in which the adapters of our own, `ours`, alone know of the engine
    muonbook    < figures, puzzles, measure and single modules < ch01, ch02, ... (no chapter knows another)
    < tools and the workers NN_slug.py, of which each belongs to the chapter NN; train.py and plan.py to none
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ENGINE_ROOMS = (
    "launch", "sharding", "optim", "extras", "models", "verify"
)  # fmt: skip
KIT = "muon_conformance"
PACKAGES = ("distmuon", KIT, "muonbook", "tools")
TRAINER = "train"  # a program to be copied: it imports what its readers will import
EXAMPLES = "examples"  # other people's programs, outside of the house
CHAPTER = re.compile(r"ch(\d\d)|(\d\d)b?_\w+")  # a chapter's room, worker and notebook; with a b, its second page's
PYTESTS = re.compile(r"(conftest|test_\w+)\.py")  # found by pytest, by their names
JOB = re.compile(rf"((?:{'|'.join(PACKAGES)})(?:\.\w+)*):(\w+)")  # a worker's name, as `launch.run` takes it


class Arrow(NamedTuple):
    """`importer` (a module, or a notebook's file) needs `name` of `module`; None: the module itself."""

    importer: str
    module: str
    name: str | None
    line: int


class House:
    """The modules under scripts/ by dotted name (a worker by its file's name alone), and every arrow between them."""

    def __init__(self, root: Path) -> None:
        self.root, scripts = root, root / "scripts"
        self.paths: dict[str, Path] = {}
        for path in sorted(scripts.rglob("*.py")):
            parts = path.relative_to(scripts).with_suffix("").parts
            if parts[0] == EXAMPLES:
                continue
            self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.paths.items()}

    @cached_property
    def arrows(self) -> list[Arrow]:
        """Every import of ours in scripts/, inside functions and for type checkers too, and every worker's name."""
        return [arrow for name in self.trees for arrow in self._arrows(name, self.trees[name])]

    @cached_property
    def notebook_arrows(self) -> list[Arrow]:
        return [
            arrow
            for path in sorted((self.root / "notebooks").glob("*.ipynb"))
            for arrow in self._arrows(path.name, _notebook_tree(path))
        ]

    def _arrows(self, importer: str, tree: ast.AST) -> Iterator[Arrow]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] in PACKAGES:
                        yield Arrow(importer, alias.name, None, node.lineno)
            elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] in PACKAGES):
                module = self._absolute(importer, node)
                for alias in node.names:
                    inner = f"{module}.{alias.name}"
                    is_module = inner in self.paths
                    yield Arrow(
                        importer, inner if is_module else module, None if is_module else alias.name, node.lineno
                    )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (job := JOB.fullmatch(node.value)):
                yield Arrow(importer, job[1], job[2], node.lineno)
            elif isinstance(node, ast.Constant) and node.value in self.paths and node.value.count(".") > 1:
                yield Arrow(importer, node.value, None, node.lineno)  # a module by its full name

    def _absolute(self, importer: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return str(node.module)
        package = self.paths[importer].name == "__init__.py"
        parts = importer.split(".")
        kept = parts[: len(parts) - node.level + package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def where(self, arrow: Arrow) -> str:
        """Return the place of an arrow, as an editor finds it; the lines of a notebook are nobody's."""
        path = self.paths.get(arrow.importer)
        return f"{path.relative_to(self.root)}:{arrow.line}" if path else f"notebooks/{arrow.importer}"


def _notebook_tree(path: Path) -> ast.Module:
    """Return the code cells as one module; what only a notebook understands is left out."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    unbroken = [source.replace("\\\n", " ") for source in sources]  # a command may go on in the next line
    lines = [line for source in unbroken for line in source.splitlines() if not re.match(r"\s*[!%]", line)]
    return ast.parse("\n".join(lines))


# ---- Arrows -----------------------------------------------------------------------------------------------


def chapter_of(name: str) -> str | None:
    """Return "ch07" for whatever belongs to chapter 7 alone: its room's modules, its worker, its notebook."""
    found = CHAPTER.fullmatch((name.removeprefix("muonbook.") if name.startswith("muonbook.") else name).split(".")[0])
    return f"ch{found[1] or found[2][:2]}" if found else None


def room_of(name: str) -> str:
    """Return the room of a module: `distmuon.optim`, `muonbook.ch07`, `tools`; a worker is one by itself."""
    parts = name.split(".")
    return name if len(parts) == 1 else parts[0] if parts[0] in ("tools", KIT) else ".".join(parts[:2])


def floor_of(name: str) -> int:
    """Return how far up a module stands; a module imports from its own room and from the floors below."""
    package, *rest = name.split(".")
    if package == "distmuon":
        return ENGINE_ROOMS.index(rest[0]) if rest and rest[0] in ENGINE_ROOMS else len(ENGINE_ROOMS)
    if package == KIT:
        return len(ENGINE_ROOMS)
    above = len(ENGINE_ROOMS) + 1
    if package == "muonbook":
        return above + (chapter_of(name) is not None)
    return above + 2 + (package != "tools")


def upward(house: House) -> list[str]:
    """Arrows run downward only; chapters never import each other; nobody imports a worker."""
    found = []
    for arrow in house.arrows:
        ours, theirs = chapter_of(arrow.importer), chapter_of(arrow.module)
        where = f"{house.where(arrow)} imports {arrow.module}"
        if arrow.module == "distmuon" and arrow.importer not in ("distmuon", TRAINER):
            found.append(f"{where}: those names are for others; name the module that holds {arrow.name}.")
        elif room_of(arrow.importer) == room_of(arrow.module):
            continue
        elif room_of(arrow.importer) == KIT and arrow.importer != f"{KIT}.ours":
            found.append(f"{where}: the kit knows nothing of ours but its adapters; let it do with torch alone.")
        elif ours and theirs and ours != theirs:
            found.append(f"{where}: chapters do not know each other; move what both need into a shared room.")
        elif floor_of(arrow.module) > floor_of(arrow.importer):
            found.append(f"{where}, which stands above it; move what it needs down, or itself up.")
        elif arrow.module.startswith("tools") and arrow.importer[:1].isdigit():
            found.append(f"{where}: a worker needs no tool; move what both need into muonbook.")
    return found


def circles(house: House) -> list[str]:
    """No circle among modules, packages' __init__ included, and none among rooms."""
    rooms = [Arrow(room_of(a.importer), room_of(a.module), None, a.line) for a in house.arrows]
    remedy = "move what both sides need into a module that imports neither."
    return [f"{' -> '.join(path)}: a circle of modules; {remedy}" for path in _circles(house.arrows)] + [
        f"{' -> '.join(path)}: a circle of rooms; {remedy}" for path in _circles(rooms)
    ]


def _circles(arrows: Iterable[Arrow]) -> Iterator[list[str]]:
    """Yield one circle, as a closed path, for each arrow that closes one; a depth-first walk finds them."""
    following: dict[str, set[str]] = {}
    for arrow in arrows:
        if arrow.importer != arrow.module:
            following.setdefault(arrow.importer, set()).add(arrow.module)
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> Iterator[list[str]]:
        if name in path:
            yield [*path[path.index(name) :], name]
        elif name not in done:
            for other in sorted(following.get(name, ())):
                yield from walk(other, [*path, name])
            done.add(name)

    for name in sorted(following):
        yield from walk(name, [])


def unresolved(house: House) -> list[str]:
    """Every import of ours, in scripts and notebooks, finds its module and its name; so does every named worker."""
    names = {module: set(_bound(tree.body)) for module, tree in house.trees.items()}
    found = []
    for arrow in (*house.arrows, *house.notebook_arrows):
        if arrow.module not in house.paths:
            found.append(f"{house.where(arrow)} imports {arrow.module}, which does not exist; follow where it moved.")
        elif arrow.name not in {None, "*", *names[arrow.module]}:
            found.append(f"{house.where(arrow)} imports {arrow.name}, which {arrow.module} does not have.")
    return found


def _bound(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield every name that statements at the top level of a module bind."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
        else:
            yield from (n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            for block in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(statement, block, ()))


def unused(house: House) -> list[str]:
    """A module that nobody uses can go, unless it is run or, as strategies are, loaded by name. Tests do not count."""
    used = {arrow.module for arrow in (*house.arrows, *house.notebook_arrows) if arrow.importer != arrow.module}
    return [
        f"{path.relative_to(house.root)} is used by nobody; remove it, or move it to the tests that need it."
        for name, path in house.paths.items()
        if name not in used and not (path.name == "__init__.py" or PYTESTS.fullmatch(path.name))
        if not _runs(house.trees[name]) and not _is_loaded_by_name(house.trees[name])
    ]


def _runs(tree: ast.Module) -> bool:
    """Say whether a module is a program: a worker begins something when it is run by name, a tool has a `main`."""
    return any(
        "__name__" in ast.dump(node.test) if isinstance(node, ast.If) else getattr(node, "name", "") == "main"
        for node in tree.body
    )


def _is_loaded_by_name(tree: ast.Module) -> bool:
    """Say whether a module names a STRATEGY, which `optim.strategies` finds by the file's name."""
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "STRATEGY" for target in targets)
