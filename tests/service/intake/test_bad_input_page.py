"""docs/bad-input.md lists every reason that the code gives, with the code that it travels under."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from modelpress import errors
from service.edge.errors import STATUS

ROOT = Path(__file__).parents[3]
MODULES = [
    *sorted((ROOT / "service/intake").glob("*.py")),
    *(
        ROOT / "service" / name
        for name in ("adapter_fit.py", "fit.py", "language_fit.py", "model_fit.py", "preflight.py")
    ),
    *(ROOT / "modelpress" / name for name in ("request_rules.py", "task_rules.py")),
    *(ROOT / name for name in ("modelpress/safetensors_header.py", "service/storage/upload_writer.py")),
]
DEFAULTS = {kind.reason: kind for kind in STATUS}
"""A class's own reason, where a refusal gives no narrower one."""
REASON = re.compile(r"[A-Z]+(_[A-Z]+)+")
ROW = re.compile(r"^\|[^|]+\| ([A-Z_]+) \| (`[A-Z_`, ]+`) \|", re.MULTILINE)


def listed() -> dict[str, str]:
    """Reason -> code, from the page."""
    page = (ROOT / "docs/bad-input.md").read_text()
    return {reason: code for code, cell in ROW.findall(page) for reason in re.findall(r"[A-Z_]{2,}", cell)}


def constants(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and REASON.fullmatch(node.value):
            yield node.value


def raised(tree: ast.AST) -> Iterator[tuple[str, type[errors.ModelpressError]]]:
    """(reason, class) of every call of an error class with a literal reason."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(errors, node.func.id):
            for keyword in node.keywords:
                if keyword.arg == "reason" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value), getattr(errors, node.func.id)


def test_the_page_lists_every_reason_of_the_code() -> None:
    given = {reason for module in MODULES for reason in constants(ast.parse(module.read_text()))}
    assert given - listed().keys() == set()


def test_the_page_lists_no_reason_that_the_code_does_not_give() -> None:
    everywhere = {
        reason
        for folder in ("service", "modelpress")
        for module in (ROOT / folder).rglob("*.py")
        if "v1" not in module.parts
        for reason in constants(ast.parse(module.read_text()))
    }
    assert listed().keys() - everywhere - DEFAULTS.keys() == set()


def test_each_reason_travels_under_the_code_that_the_page_says() -> None:
    page = listed()
    for reason, kind in DEFAULTS.items():
        if reason in page:
            assert page[reason] == STATUS[kind].name, reason
    for module in MODULES:
        for reason, kind in raised(ast.parse(module.read_text())):
            assert page[reason] == STATUS[kind].name, reason
