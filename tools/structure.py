"""Reject import cycles and folders that have grown too large.

`make lint` runs it beside import-linter, which enforces the layers.

- No cycle between modules of the workspace; imports inside functions and under `TYPE_CHECKING` count.
- No cycle between packages: two folders of one distribution do not import each other.
- No folder has more than `MODULES_MAX` modules, generated ones not counted.

Exit codes: 0 no finding, 1 findings.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = ("libs/*/src", "services/*/src", "cli/src", "spark-jobs/src", "e2e/src", "e2e/simulation/src")
MODULES_MAX: Final = 15
"""Maximum number of modules in a folder, `__init__` not counted."""

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Name -> file of every module of the workspace, generated ones included."""
    found = {}
    for pattern in SOURCES:
        for root in ROOT.glob(pattern):
            for path in root.rglob("*.py"):
                name = ".".join(path.relative_to(root).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Modules of the workspace that a file imports, also inside functions and for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found |= {name for name in (submodule if submodule in known else node.module,) if name in known}
    return found


def cycles(graph: Graph) -> list[list[str]]:
    """Strongly connected components of more than one node, sorted (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = []
            while True:
                member = stack.pop()
                component.append(member)
                if member == node:
                    break
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)


def package_graph(graph: Graph, packages: set[str]) -> dict[str, set[str]]:
    """The graph between the packages below each top-level package; a module directly below that is its own node."""

    def node(name: str) -> str:
        if name in packages or name.count(".") < 2:
            return name
        return name.rpartition(".")[0]

    result: defaultdict[str, set[str]] = defaultdict(set)
    for source, targets in graph.items():
        for target in targets:
            ends = node(source), node(target)
            if ends[0] != ends[1] and not _contains(*ends) and not _contains(*reversed(ends)):
                result[ends[0]].add(ends[1])
    return dict(result)


def _contains(outer: str, inner: str) -> bool:
    return inner.startswith(f"{outer}.")


def main() -> int:
    known = modules()
    packages = {name for name, path in known.items() if path.name == "__init__.py"}
    graph = {name: imports(path, known) - {name} for name, path in known.items()}
    problems = [f"import cycle of modules: {', '.join(members)}" for members in cycles(graph)]
    problems += [
        f"import cycle of packages: {', '.join(members)}" for members in cycles(package_graph(graph, packages))
    ]
    sizes: defaultdict[Path, int] = defaultdict(int)
    for path in known.values():
        if path.name != "__init__.py" and not path.stem.endswith("_pb2"):
            sizes[path.parent] += 1
    problems += [
        f"{folder.relative_to(ROOT)} has {count} modules, at most {MODULES_MAX} are allowed: split it by concern"
        for folder, count in sorted(sizes.items())
        if count > MODULES_MAX
    ]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    sys.exit(main())
