"""A stage's result is cached under its VERSION: a changed source with an unchanged version would serve stale results.

The sources of an operation are its module and every module of compressors/, evaluators/ and modelpress/ that it
imports, without comments, docstrings and type-only wording of theirs (the digest is taken of the syntax tree).
After a change that may alter results: raise the VERSION, then `python tests/repository/test_versions.py`.
"""

import ast
import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("versions.json")
PACKAGES = ("compressors", "evaluators")


def source(module: str) -> Path | None:
    file = ROOT / (module.replace(".", "/") + ".py")
    return file if file.exists() else None


def closure(module: str) -> dict[str, ast.Module]:
    """The module and what it imports from this repository's algorithm packages, by name."""
    found: dict[str, ast.Module] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = source(name)
        if name in found or file is None:
            continue
        found[name] = ast.parse(file.read_text())
        for node in ast.walk(found[name]):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def without_docstrings(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return ast.dump(tree)


def version(tree: ast.Module) -> int | None:
    assignments = [n for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "VERSION"]
    return ast.literal_eval(assignments[0].value) if assignments else None


def current() -> dict[str, dict[str, object]]:
    """Version and sources of every module that has a VERSION."""
    state = {}
    for file in sorted(file for package in PACKAGES for file in (ROOT / package).glob("*.py")):
        module = f"{file.parent.name}.{file.stem}"
        trees = closure(module)
        number = version(trees[module])
        if number is None:
            continue
        text = "\n".join(f"{name} {without_docstrings(trees[name])}" for name in sorted(trees))
        state[module] = {"version": number, "sources": hashlib.sha256(text.encode()).hexdigest()}
    return state


def test_a_changed_source_raises_its_version():
    recorded = json.loads(RECORDED.read_text())
    now = current()
    stale = [
        m
        for m in now.keys() & recorded.keys()
        if now[m]["sources"] != recorded[m]["sources"] and now[m]["version"] == recorded[m]["version"]
    ]
    assert not stale, f"sources of {stale} changed: raise VERSION where results may change, then run this file"
    assert now == recorded, "run this file to record the new versions"


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(current(), indent=2) + "\n")
