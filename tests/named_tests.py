"""Tests that a page refers to: whether they are there and could fail."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def can_fail(test: str) -> bool:
    """`file::function` or `file::Class::function`, from the folder of tests: whether it asserts or expects an error."""
    file, *path = test.split("::")
    body: list[ast.stmt] = ast.parse((TESTS / file).read_text()).body
    for name in path:
        found = [node for node in body if getattr(node, "name", None) == name]
        if len(found) != 1:
            return False
        body = getattr(found[0], "body", [])
    nodes = [node for statement in body for node in ast.walk(statement)]
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.expr) and ast.unparse(node) == "pytest.raises")
        for node in nodes
    )
