"""Names the worker that is to compute a prompt, where that is another one than the one that decodes.

The choice is the router's (`headwater.router.disagg`); here it is carried out: the request says where, and both workers
are booked for their part.
"""

from collections.abc import Callable, Sequence

from headwater.errors import NoWorkers
from headwater.protocol.request import EngineRequest, RemotePrefill
from headwater.router.disagg import DisaggSettings, PrefillChoice, choose_prefill
from headwater.router.request import RouteRequest
from headwater.router.view import ClusterView
from headwater.router.worker import Booking, WorkerView

IsLoose = Callable[[str], bool]
"""Whether requests for a model, by its fingerprint, may leave the plan of roles."""


class Prefills:
    def __init__(self, view: ClusterView, settings: DisaggSettings, is_loose: IsLoose = lambda _: False) -> None:
        self.is_loose = is_loose
        self._view = view
        self._settings = settings

    def choose(self, asked: RouteRequest, decoder: WorkerView, refused_by: Sequence[str] = ()) -> PrefillChoice | None:
        """None where there is no choice. Raises `NoWorkers` where there has to be one."""
        prefillers = [
            worker for worker in self._prefillers(asked.fingerprint, decoder) if worker.worker_id not in refused_by
        ]
        if not prefillers:
            if decoder.instance.paired:
                raise NoWorkers(f"worker {decoder.worker_id} computes no prompts, and no other one does")
            return None
        return choose_prefill(self._settings, asked, decoder, prefillers, self.is_loose(asked.fingerprint))

    def name(self, choice: PrefillChoice | None, requests: Sequence[EngineRequest]) -> None:
        """Say it in the requests; those of an earlier choice are void."""
        where = None
        if choice is not None and choice.remote:
            worker = self._view.worker(choice.chosen.worker_id)
            where = None if worker is None else self._where(worker, choice)
        for request in requests:
            request.prefill = where

    def book(self, choice: PrefillChoice | None, asked: RouteRequest) -> Booking | None:
        """The prefill worker's part: to be released when the first token is there."""
        if choice is None or not choice.remote:
            return None
        worker = self._view.worker(choice.chosen.worker_id)
        if worker is None:
            return None
        return self._view.book(worker, asked.num_prompt_tokens, 1, choice.chosen.cached_tokens, asked.keys, 1.0)

    def _where(self, worker: WorkerView, choice: PrefillChoice) -> RemotePrefill:
        option = choice.chosen
        return RemotePrefill(
            worker.worker_id,
            worker.instance.request_address,
            expected_ms=option.price.own_ms + option.price.handoff_ms,
            expected_cached_tokens=option.cached_tokens,
            frontend_id=self._view.frontend_id,
            bootstrap=worker.instance.bootstrap,
            here_ms=choice.options[0].total_ms,
        )

    def _prefillers(self, fingerprint: str, decoder: WorkerView) -> list[WorkerView]:
        """Prefill workers whose blocks the decode worker can use."""
        card = decoder.instance.card
        return [
            worker
            for worker in self._view.prefillers(fingerprint)
            if worker is not decoder
            and (worker.instance.card.kv_layout, worker.instance.card.dtype) == (card.kv_layout, card.dtype)
            and worker.instance.paired == decoder.instance.paired
        ]
