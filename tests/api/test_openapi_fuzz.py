"""Requests generated from our own OpenAPI, valid and not, against a real server: no 5xx, and answers fit the schema."""

import json
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.generation import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance  # noqa: E402
from served_demo import demo_cluster  # noqa: E402

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]


@pytest.mark.model
def test_generated_requests_are_answered_as_the_schema_says(run_folder: Path) -> None:
    with demo_cluster(run_folder, "--engine", "mocker", "--mocker-speedup", "0") as url:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            model = json.load(answer)["data"][0]["id"]
        operations = [
            result.ok() for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()
        ]
        assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/completions", "/tokenize"}
        for operation in operations:
            statuses: Counter[int] = Counter()
            modes = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]

            @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            @given(case=st.one_of(modes))
            def run(case: schemathesis.Case) -> None:
                if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                    case.body["model"] = model
                response = case.call(timeout=30)
                statuses[response.status_code] += 1  # noqa: B023 - run at once
                case.validate_response(response, checks=CHECKS)

            run()
            assert set(statuses) <= {200, 400, 404, 405, 413}, (operation.path, statuses)
