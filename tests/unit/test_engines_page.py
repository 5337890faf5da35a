"""The table of engines in the documents: current, complete, and without a failure."""

from pathlib import Path

from engines_page import FORMS, checks, page, recorded

PAGE = Path(__file__).parents[2] / "docs/engines.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python tests/engines_page.py > docs/engines.md"


def test_what_was_recorded_of_vllm_has_no_failure() -> None:
    for form in FORMS:
        results = recorded()["forms"][form]
        assert {name for name, (result, _) in results.items() if result == "failed"} == set()
        assert set(results) - set(checks()), "vLLM's own checks were run"
