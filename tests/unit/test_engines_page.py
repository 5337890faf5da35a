"""The table of engines in the documents: current, complete, without a failure, and shown by tests that run."""

import ast
from pathlib import Path

import pytest

from engines_page import DOUBLES, FORMS, KINDS, OWN, REAL, TESTS, checks, conformance, need_not, page, recorded
from headwater.engines.conformance import EngineConformance

PAGE = TESTS.parent / "docs/engines.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python tests/engines_page.py > docs/engines.md"


def test_what_was_recorded_of_vllm_has_no_failure() -> None:
    for form in FORMS:
        results = recorded()["forms"][form]
        assert {name for name, (result, _) in results.items() if result == "failed"} == set()
        assert set(results) - set(checks()), "vLLM's own checks were run"


@pytest.mark.parametrize("where", [*OWN.values(), *DOUBLES.values(), REAL])
def test_a_column_is_the_whole_suite_as_it_is(where: str) -> None:
    """No class of tests has a check of its own making under the name of one of the suite's, or leaves one out."""
    found = conformance(where)
    for name in checks():
        assert getattr(found, name) is getattr(EngineConformance, name)
        assert not hasattr(getattr(found, name), "pytestmark")
    assert not hasattr(found, "pytestmark")
    assert found.remarks().keys() <= set(checks())


def test_every_row_that_is_not_of_the_suite_names_tests_that_would_fail() -> None:
    for row in need_not():
        assert len(row.cells) == len(KINDS) - 1, row.name
        assert row.tests, row.name
        for test in row.tests:
            file, *path = test.split("::")
            assert asserts(TESTS / file, path), f"{row.name}: {test} is no test that can fail"


def asserts(file: Path, path: list[str]) -> bool:
    """Whether there is such a function, in classes or not, and it asserts something or expects an error."""
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for name in path:
        (found,) = [node for node in body if getattr(node, "name", None) == name]
        body = getattr(found, "body", [])
    words = {ast.unparse(node) for statement in body for node in ast.walk(statement) if isinstance(node, ast.expr)}
    return "pytest.raises" in words or any(
        isinstance(node, ast.Assert) for statement in body for node in ast.walk(statement)
    )
