"""What vLLM's own source says may change in its modules while a process runs: found without importing any of it.

So that modules for devices that are not here are looked at as well. Found are variables of a module that its functions
assign (``global``), and its dictionaries, lists and sets that its functions put something into. Not found are function
caches and attributes of classes: those the detector sees in a running process.
"""

import ast
from pathlib import Path

APART = ("benchmarks", "entrypoints", "third_party", "vllm_flash_attn")
"""Packages that no worker runs a model with."""
_FILLING = frozenset(
    {"append", "add", "update", "setdefault", "pop", "clear", "extend", "insert", "remove", "discard", "popitem"}
)


def changing(package: Path) -> set[str]:
    """``module:name`` of all of them below a package's folder."""
    found: set[str] = set()
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if parts[1] in APART:
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found |= {f"{module}:{name}" for name in _changing(ast.parse(path.read_text(encoding="utf-8")))}
    return found


class _Visitor(ast.NodeVisitor):
    """One walk over a module: what it assigns itself, and what its functions assign or fill from outside."""

    def __init__(self) -> None:
        self.variables: set[str] = set()
        self.changed: set[str] = set()
        self._scopes: list[tuple[set[str], set[str], set[str]]] = []
        """Of each function around: names declared global, its own names, and those of what it fills."""

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        declared, own, filled = scope = (set[str](), set[str](), set[str]())
        self._scopes.append(scope)
        self.generic_visit(node)
        self._scopes.pop()
        own -= declared
        self.changed |= declared
        filled -= own
        if self._scopes:
            self._scopes[-1][2].update(filled)
        else:
            self.changed |= filled

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.visit(part)

    def visit_Global(self, node: ast.Global) -> None:
        self._scopes[-1][0].update(node.names)

    def visit_arg(self, node: ast.arg) -> None:
        self._scopes[-1][1].add(node.arg)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            (self._scopes[-1][1] if self._scopes else self.variables).add(node.id)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del) and isinstance(node.value, ast.Name):
            self._fills(node.value.id)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _FILLING and isinstance(function.value, ast.Name):
            self._fills(function.value.id)
        self.generic_visit(node)

    def _fills(self, name: str) -> None:
        if self._scopes:
            self._scopes[-1][2].add(name)


def _changing(tree: ast.Module) -> set[str]:
    visitor = _Visitor()
    visitor.visit(tree)
    return visitor.changed & visitor.variables
