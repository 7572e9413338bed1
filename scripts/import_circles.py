"""Circles of imports among the modules of a crate.

Sibling modules (children of one module) form a circle if each uses the other. A module and its own children may use
each other.

The source is read as text: `use` declarations, and paths that begin with `crate`, `self`, `super` or an imported name.
What a module re-exports belongs to where it was defined.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

Module = tuple[str, ...]


class Crate:
    """The modules of one crate, each with what its `use` declarations name and the paths its code has."""

    def __init__(self, src: Path):
        self.names: dict[Module, dict[str, Module]] = {}
        self.paths: dict[Module, set[Module]] = {}
        texts = {}
        for file in src.rglob("*.rs"):
            module = file.relative_to(src).with_suffix("").parts
            if module[-1] in ("mod", "lib", "main"):
                module = module[:-1]
            if not any(
                part.startswith("tests") or part.endswith("_test") or part in ("test", "fuzzing") for part in module
            ):
                texts[module] = without_tests(file.read_text())
        self.modules = set(texts)
        for module, text in texts.items():
            self.names[module], self.paths[module] = {}, set()
            for declaration in re.finditer(r"^[ \t]*(?:pub(?:\([^)]*\))? )?use ([^;]+);", text, re.M):
                for path, name in leaves(declaration[1]):
                    absolute = self.absolute(module, path)
                    if absolute is not None:
                        self.paths[module].add(absolute)
                        self.names[module][name] = absolute
        for module, text in texts.items():
            for match in re.finditer(r"(?<![\w:])((?:r#)?[a-z_]\w*(?:::\w+)+)", text):
                first, *rest = match[1].split("::")
                if first in ("crate", "self", "super"):
                    path = self.absolute(module, (first, *rest))
                elif first in self.names[module]:
                    path = self.names[module][first] + tuple(rest)
                else:
                    continue
                if path is not None:
                    self.paths[module].add(path)

    def absolute(self, module: Module, path: Module) -> Module | None:
        """A path as its crate's root sees it; None if it leads out of the crate."""
        if path[0] == "crate":
            return path[1:]
        if path[0] == "self":
            return module + path[1:]
        if path[0] == "super":
            while path and path[0] == "super":
                module, path = module[:-1], path[1:]
            return module + path
        return module + path if module + path[:1] in self.modules else None

    def home(self, path: Module, seen: frozenset = frozenset()) -> Module:
        """The module in which what a path names is defined."""
        at: Module = ()
        for i, part in enumerate(path):
            if (*at, part) in self.modules:
                at = (*at, part)
            elif part in self.names.get(at, {}) and (at, part) not in seen:
                return self.home(self.names[at][part] + path[i + 1 :], seen | {(at, part)})
            else:
                break
        return at

    def circles(self):
        """Each circle: the module it lies in, its members, and the uses that make it."""
        edges = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
        for module, paths in self.paths.items():
            for path in paths:
                to = self.home(path)
                n = 0
                while n < min(len(module), len(to)) and module[n] == to[n]:
                    n += 1
                if n < len(module) and n < len(to):
                    edges[module[:n]][module[n]][to[n]].add(f"{'/'.join(module)} uses {'::'.join(path)}")
        for parent, graph in sorted(edges.items()):
            reach = {a: reachable(graph, a) for a in graph}
            met = set()
            for a in sorted(graph):
                circle = {b for b in reach[a] if a in reach.get(b, ())}
                if a in reach[a] and a not in met:
                    met |= circle
                    uses = sorted(use for b in circle for c in graph[b] if c in circle for use in graph[b][c])
                    yield parent, sorted(circle), uses


def reachable(graph, start) -> set:
    found, todo = set(), [start]
    while todo:
        for to in graph.get(todo.pop(), ()):
            if to not in found:
                found.add(to)
                todo.append(to)
    return found


def leaves(tree: str, before: Module = ()):
    """The paths of a `use` tree, each with the name it gives them."""
    tree = tree.strip()
    if tree.startswith("{"):
        depth, start = 0, 1
        for i, char in enumerate(tree):
            depth += (char == "{") - (char == "}")
            if (char == "," and depth == 1) or (char == "}" and depth == 0):
                if tree[start:i].strip():
                    yield from leaves(tree[start:i], before)
                start = i + 1
        return
    head, found, rest = tree.partition("::")
    if found:
        yield from leaves(rest, (*before, head.strip()))
        return
    item, _, name = tree.partition(" as ")
    path = before if item.strip() in ("self", "*") else (*before, item.strip())
    if path:
        yield path, (name.strip() or path[-1]) if item.strip() != "*" else "*"


def without_tests(text: str) -> str:
    """Without comments, and without items that only tests and fuzzing have."""
    lines = re.sub(r"//[^\n]*", "", text).split("\n")
    kept, i = [], 0
    while i < len(lines):
        if not re.match(r'\s*#\[cfg\((any\()?(all\()?(test|fuzzing|feature = "testing")', lines[i]):
            kept.append(lines[i])
            i += 1
            continue
        i += 1
        while re.match(r"\s*#\[", lines[i]):
            i += 1
        indent = re.match(r"\s*", lines[i])[0]
        # An item of several lines ends with what closes it, indented as it began.
        last = lines[i].rstrip()
        if last.endswith(("{", "[", "(")):
            while not re.match(re.escape(indent) + r"[}\])]", lines[i]):
                i += 1
        elif not last.endswith((";", "}", ",")):
            while not lines[i].rstrip().endswith((";", "}")):
                i += 1
        i += 1
    return "\n".join(kept)


def main(sources: list[str]) -> int:
    wrong = 0
    for src in sorted(Path(s) for s in sources):
        for parent, circle, uses in Crate(src).circles():
            wrong += 1
            print(f"{src.parent.name} {'::'.join(('crate', *parent))}: {', '.join(circle)} use each other in a circle")
            print("".join(f"    {use}\n" for use in uses), end="")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
