"""`headwater restart` and `headwater drain` under load: nobody notices."""

import json
import threading
import urllib.request

from test_serve_command import environment as environment  # a fixture
from test_serve_command import headwater, serve, worker_pids

TOKENS = 40
BODY = {"model": "mock", "messages": [{"role": "user", "content": "go on"}], "max_tokens": TOKENS, "stream": True}
BODY |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
PACED = ["--engine", "mocker", "--served-model-name", "mock", "--port", "0", "--mocker-decode-base-ms", "10"]


class Load:
    """Clients that ask again and again, over connections of their own, until they are stopped."""

    def __init__(self, url: str, count: int) -> None:
        self.outcomes: list[str] = []
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[str]:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        return self.outcomes

    def _ask(self) -> None:
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions", json.dumps(BODY).encode(), {"content-type": "application/json"}
        )
        while not self._stop.is_set():
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    events = answer.read().decode().split("\n\n")
                used = json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"]
                self.outcomes.append("complete" if used == TOKENS and events[-2] == "data: [DONE]" else events[-3])
            except OSError as error:
                self.outcomes.append(f"{type(error).__name__}: {error}")


def test_a_restart_of_everything_and_a_drained_worker_cost_nobody_anything(environment: dict[str, str]) -> None:
    with serve(environment, *PACED, "--workers", "2", "--drain-timeout", "5s") as running:
        load = Load(running.url, 4)
        running.until(lambda: len(load.outcomes) > 8)
        before = worker_pids(environment)
        restarted = headwater(environment, "restart", "--json", "--wait", "50s")
        assert restarted.returncode == 0, restarted.stderr + running.err
        assert json.loads(restarted.stdout)["over"]
        after = worker_pids(environment)
        assert len(after) == 2
        assert set(after.values()).isdisjoint(before.values())
        count = len(load.outcomes)
        running.until(lambda: len(load.outcomes) > count + 8)
        drained = headwater(environment, "drain", min(after), "--within", "1s", "--json")
        assert drained.returncode == 0, drained.stderr
        assert json.loads(drained.stdout)["state"] == "gone"
        running.until(lambda: len(worker_pids(environment)) == 2)
        unknown = headwater(environment, "drain", "nobody")
        assert unknown.returncode == 2
        assert "there is no worker nobody" in unknown.stderr
        outcomes = load.stop()
        assert set(outcomes) == {"complete"}, sorted(set(outcomes))
        assert running.end() == 0


def test_verbs_say_when_there_is_nothing(environment: dict[str, str]) -> None:
    found = headwater(environment, "restart")
    assert found.returncode == 1
    assert "no `headwater serve` runs here" in found.stderr
