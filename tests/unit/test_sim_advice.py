"""`headwater advise`: the right answer for the two well-known cases, with the reason in words."""

import json
from pathlib import Path

import pytest

from headwater.cli.verbs import parser_of, runner_of
from headwater.errors import ConfigError
from headwater.planner.objective import Objective
from headwater.planner.plan import RolePlan
from headwater.sim.advice import Figures, Load, Times, front, synthetic
from headwater.sim.options import Layout, Option, layouts
from headwater.sim.reasons import reasons, verdict, where


def advise(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    args = parser_of("advise").parse_args([*flags, "--json"])
    assert runner_of("advise")(args) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_long_prompts_with_a_tight_pace_are_split_and_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 70B FP8 on H200, 3000/150: chunks of prefill stretch every decode that rides with them."""
    found = advise(
        capsys, "--isl", "3000", "--osl", "150", "--gpus", "4", "--rate", "6", "--ttft", "2500ms", "--tpot", "28ms",
        "--tensor-parallel-size", "1", "--tensor-parallel-size", "2",
    )  # fmt: skip
    best = found["recommended"]
    assert isinstance(best, dict)
    assert best["kind"] == "split"
    assert best["attained"] > 0.95
    words = " ".join(str(sentence) for sentence in found["why"])  # type: ignore[attr-defined]
    assert "standing still while prompts of others are computed" in words
    assert "28 are asked for" in words


def test_a_fixed_half_and_half_split_of_two_large_workers_loses(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt-oss-120b on 8 x H200, 1000/1000: ai-dynamo/dynamo issue 3774."""
    found = advise(
        capsys, "--model", "gpt-oss-120b", "--isl", "1000", "--osl", "1000", "--concurrency", "32",
        "--tensor-parallel-size", "4", "--tensor-parallel-size", "8", "--compare", "1xTP4P+1xTP4D",
    )  # fmt: skip
    best = found["recommended"]
    assert isinstance(best, dict)
    assert best["kind"] == "aggregated"
    words = " ".join(str(sentence) for sentence in found["why"])  # type: ignore[attr-defined]
    assert "1xTP4P+1xTP4D fits badly: its prefill workers compute" in words
    assert "more decode steps" in words


def test_the_page_holds_the_front_and_the_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "advice.html"
    advise(capsys, "--gpus", "2", "--isl", "500", "--osl", "50", "--html", str(page), "--tensor-parallel-size", "1")
    text = page.read_text()
    assert "Throughput against interactivity" in text
    assert "Where the time goes" in text
    assert "<script" not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "llama-3.1-405b-fp8", "--gpus", "1"), "does not fit"),
        (("--rate", "0"), "more than 0"),
        (("--compare", "3xTP1Q"), "no workers are written"),
        (("--compare", "2xTP1P"), "some decode"),
        (("--concurrency", "4", "--rate", "3"), "not together"),
    ],
)
def test_what_cannot_be_advised_is_refused(flags: tuple[str, ...], message: str) -> None:
    args = parser_of("advise").parse_args(list(flags))
    with pytest.raises(ConfigError, match=message):
        runner_of("advise")(args)


def test_options_are_written_as_they_are_read() -> None:
    for written in ("8xTP1", "4xTP1P+1xTP4D", "1xTP1P+2xTP2P+1xTP1D+1xTP2D", "1xTP2P+3xTP1"):
        assert str(Option.parse(written)) == written
    assert Option.parse("1xTP2D+1xTP1P") == Option(Layout((1, 2)), RolePlan(("prefill", "decode")))


def test_layouts_use_all_gpus() -> None:
    found = layouts(8, [1, 2, 4, 8])
    assert all(layout.num_gpus == 8 for layout in found)
    names = [str(layout) for layout in found]
    assert len(set(names)) == len(names)
    assert {"8xTP1", "1xTP8", "4xTP1+2xTP2", "4xTP1+1xTP4"} <= set(names)


def test_a_load_keeps_its_requests_at_another_rate() -> None:
    load = synthetic(1000, 100, 50)
    faster = load.at_rate(20.0)
    assert faster.rate == pytest.approx(20.0)
    assert [job.prompt_tokens for job in faster.jobs] == [job.prompt_tokens for job in load.jobs]
    assert Load(load.jobs, concurrency=4).name == "4 at a time"


def figures(name: str, tpot_ms: float, per_gpu: float, *, keeps_up: bool = True, stalled_ms: float = 0.0) -> Figures:
    times = Times(10.0, 100.0, 2.0, 1000.0, stalled_ms)
    return Figures(
        name, "split", "1/s", 1.0, 1.0, 112.0, 200.0, tpot_ms, times.e2e_ms, per_gpu, times, 0.2, 0.95, keeps_up
    )


def test_the_front_leaves_out_what_is_beaten_or_does_not_keep_up() -> None:
    fast, full, beaten = figures("fast", 5.0, 50.0), figures("full", 20.0, 300.0), figures("beaten", 25.0, 100.0)
    assert front([full, beaten, fast, figures("late", 4.0, 500.0, keeps_up=False)]) == [fast, full]


def test_words_name_the_largest_difference_first_and_the_idle_side() -> None:
    good, bad = figures("good", 10.0, 100.0), figures("bad", 30.0, 90.0, stalled_ms=2000.0)
    told = list(reasons(good, bad, Objective(tpot_ms=25.0)))
    assert told[0] == "bad: 30.0 ms a token where 25 are asked for"
    assert told[1].startswith("against good, a request at bad spends 2,000 ms more standing still")
    assert "prefill workers compute 20%" in told[2]
    assert "20.0 ms stand still" in where(bad)
    assert "(-64%)" in verdict(good, bad, Objective())
