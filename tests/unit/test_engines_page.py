"""The table of engines in the documents: current, complete, without a failure, and shown by tests that run."""

import pytest

from engines_page import DOUBLES, FORMS, KINDS, OWN, REAL, TESTS, checks, conformance, need_not, page, recorded
from headwater.engines.conformance import EngineConformance
from named_tests import can_fail

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
        assert [test for test in row.tests if not can_fail(test)] == [], row.name
