"""Adaptive roles on a real cluster: set from outside, measured plan by plan, and chosen by the planner itself."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from test_serve_command import Running, environment, serve

from headwater.cli.verbs import parser_of, runner_of

__all__ = ["environment"]

SPLIT_PAYS = [
    *("--engine", "mocker", "--workers", "2", "--role", "adaptive", "--port", "0", "--max-num-batched-tokens", "2048"),
    *("--mocker-prefill-ms-per-token", "0.1", "--mocker-decode-base-ms", "10"),
    *("--plan-interval", "500ms", "--plan-ttft", "2s", "--plan-tpot", "13ms"),
]
"""A prompt of 800 tokens holds up every decode beside it for 80 ms."""


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def post(url: str, body: object) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def roles(running: Running) -> dict[str, str]:
    return {worker["worker_id"]: worker["role"] for worker in get(f"{running.url}/debug/cluster")["workers"]}


def test_roles_are_measured_insisted_on_and_chosen(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(environment, *SPLIT_PAYS) as running:
        first, second = sorted(roles(running))
        assert set(roles(running).values()) == {"both"}
        assert post(f"{running.url}/admin/plan", {"roles": {first: "prefill", second: "prefill"}})[0] == 400
        assert post(f"{running.url}/admin/plan", {"roles": {first: "prefill", second: "decode"}})[0] == 202
        running.until(lambda: roles(running) == {first: "prefill", second: "decode"})

        flags = ["--measure", "--url", running.url, "--isl", "800", "--osl", "40", "--rate", "6", "--seconds", "6"]
        args = parser_of("advise").parse_args([*flags, "--ttft", "2s", "--tpot", "13ms", "--json"])
        assert runner_of("advise")(args) == 0
        found = json.loads(capsys.readouterr().out)
        assert [plan["name"] for plan in found["plans"]] == ["2 both", "1 prefill + 1 decode", "adaptive"]
        assert all(plan["failed"] == 0 for plan in found["plans"])
        assert found["plans"][1]["tpot_ms"] < found["plans"][0]["tpot_ms"]
        flags = ["--running", "--url", running.url, "--isl", "800", "--osl", "40", "--rate", "6", "--tpot", "13ms"]
        assert runner_of("advise")(parser_of("advise").parse_args([*flags, "--ttft", "2s", "--json"])) == 0
        assert json.loads(capsys.readouterr().out)["recommended"]["name"] == "1xworkerP+1xworkerD"
        decided = get(f"{running.url}/debug/plan")
        assert decided["pinned"] == {}
        moved = sum(worker["load"].get("handoffs") is not None for worker in get_workers(running))
        assert moved, "no worker has had a prompt computed elsewhere"


def get_workers(running: Running) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get(f"{running.url}/debug/cluster")["workers"]
    return found
