"""What the classes that people come from can be asked, recorded by version: what a later one drops stays known here.

``python -m tests.support.recorded VERSION=FOLDER...`` reads the sources in folders of packages (vllm, vllm_gaudi),
importing none of them, and adds them to the record.
"""

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

FILE = Path(__file__).with_name("recorded.json")
CLASSES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "AsyncLLM": (("vllm/engine/protocol.py", "EngineClient"), ("vllm/v1/engine/async_llm.py", "AsyncLLM")),
    "LLMEngine": (("vllm/v1/engine/llm_engine.py", "LLMEngine"),),
    "MultiModelAsyncLLM": (("vllm_gaudi/v1/engine/multi_model_async_llm.py", "MultiModelAsyncLLM"),),
}
"""Each with the file of its class, behind those of what it inherits."""
Surface = dict[str, list[str] | None]
"""Public names: parameters by name in their order, those that are keywords only behind ``*``; None of what is no
method."""


def record() -> dict[str, dict[str, Surface]]:
    """By class and version."""
    found: dict[str, dict[str, Surface]] = json.loads(FILE.read_text())
    return found


def surfaces(package: Path) -> Iterator[tuple[str, Surface]]:
    """The classes of a package that is installed or lies somewhere as source."""
    for name, parts in CLASSES.items():
        files = [(package.parent / file, owner) for file, owner in parts]
        if all(file.is_file() for file, _ in files):
            yield name, {key: said for file, owner in files for key, said in sorted(_surface(file, owner).items())}


def _surface(file: Path, name: str) -> Surface:
    (owner,) = (
        node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    )
    found: Surface = {}
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= dict.fromkeys(_assigned(node))
            found[node.name] = _parameters(node)
    return {key: said for key, said in found.items() if not key.startswith("_") or key == "__init__"}


def _assigned(method: ast.AST) -> Iterator[str]:
    """Attributes of the instance that a method gives values to."""
    stored = (node for node in ast.walk(method) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return (node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self")


def _parameters(method: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str] | None:
    if any(isinstance(each, ast.Name) and each.id == "property" for each in method.decorator_list):
        return None
    given = method.args
    positional = [each.arg for each in (*given.posonlyargs, *given.args)][1:]
    return [*positional, *(["*"] if given.kwonlyargs else []), *(each.arg for each in given.kwonlyargs)]


if __name__ == "__main__":
    known = record() if FILE.exists() else {}
    for version, _, folder in (word.partition("=") for word in sys.argv[1:]):
        for name, surface in surfaces(Path(folder)):
            known.setdefault(name, {})[version] = surface
    FILE.write_text(json.dumps(known, indent=1) + "\n")
