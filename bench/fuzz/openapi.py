"""Schemathesis on our own OpenAPI: every operation with generated requests, valid and not, against a real server.

    python bench/fuzz/openapi.py --examples 300 [--url http://127.0.0.1:8000]

Without --url it starts `headwater serve --engine mocker`. Prints, per operation, how many requests were sent and what
they were answered; ends with code 1 after a 5xx, an answer that does not fit the schema, or a server that has died.
"""

import argparse
import sys
from collections import Counter

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from served import serving

Row = tuple[str, Counter[int], str]
"""(operation, statuses, what was wrong)"""

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]


def fuzz(url: str, examples: int) -> list[Row]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    model = requests.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    return [fuzz_operation(result.ok(), model, examples) for result in schema.get_all_operations()]


def fuzz_operation(
    operation: schemathesis.schemas.APIOperation, model: str, examples: int
) -> tuple[str, Counter[int], str]:
    statuses: Counter[int] = Counter()
    modes = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=st.one_of(modes))
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = model  # or nothing would get further than that
        response = case.call(timeout=30)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    fault = ""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        fault = str(error)[:2000]
    return f"{operation.method.upper()} {operation.path}", statuses, fault


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--url")
    args = parser.parse_args()
    with serving(args.url) as server:
        rows = fuzz(server.url, args.examples)
        alive = server.alive()
    for name, statuses, fault in rows:
        print(f"{name:<40}{sum(statuses.values()):>7} requests  {dict(sorted(statuses.items()))}")
        if fault:
            print(f"    {fault}")
    print("the server lives" if alive else "THE SERVER IS DEAD")
    return 0 if alive and not any(fault for _, _, fault in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
