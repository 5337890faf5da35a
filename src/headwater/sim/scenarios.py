"""Named, whole situations: load, hardware, policies, and the figures others have published for a like one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headwater.sim.mixes import Mix
from headwater.sim.report import SimReport


@dataclass(frozen=True, slots=True)
class Scenario:
    summary: str
    mix: Mix
    device: str
    model: str
    tensor_parallel: int
    workers: int
    closed: tuple[int, ...]
    speeds: tuple[float, ...]
    baseline: str
    policy: str
    published: str

    def comparison(self, reports: Sequence[SimReport]) -> Iterator[str]:
        """A line per mode: ours against the baseline."""
        by_cell = {(report.mode, report.policy): report for report in reports}
        for mode in dict.fromkeys(report.mode for report in reports):
            base, ours = by_cell[mode, self.baseline], by_cell[mode, self.policy]
            yield (
                f"{mode}: {ours.output_tok_s / base.output_tok_s:.2f}x throughput, "
                f"TTFT {base.ttft_ms_mean / ours.ttft_ms_mean:.2f}x shorter, "
                f"reuse {base.hit_rate:.0%} -> {ours.hit_rate:.0%}, "
                f"workers busy {base.utilisation:.0%} -> {ours.utilisation:.0%}"
            )


SCENARIOS: dict[str, Scenario] = {
    "headline": Scenario(
        summary="400 fixed RAG contexts of 8,000 tokens, conversations of 4 turns, a 70B model on a server of 8 GPUs",
        # All contexts together fill the KV memory of the server; one GPU holds an eighth of them.
        mix=Mix("rag-400", 1000, 1.0, 400, 8000, 4, 150, 150, 10.0, skew=0.5),
        device="h200-sxm",
        model="llama-3.1-70b-fp8",
        tensor_parallel=1,
        workers=8,
        closed=(32,),
        speeds=(1.0, 2.0),
        baseline="round_robin",
        policy="delay",
        published="published for NVIDIA Dynamo, load not stated: 3.6x, 3.5x, 15 % -> 68 %, 62 % -> 89 %",
    ),
}
"""By name, for `headwater simulate --scenario`."""
