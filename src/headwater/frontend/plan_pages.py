"""The plan of roles, to be read and to be set.

GET /debug/plan    of every model with adaptive workers: who does what, and what that was chosen from; of every model
                   what is known of its workers
POST /admin/plan   {"roles": {"WORKER": "prefill", ...}} insists on roles, {"roles": null} lets the planner choose again
"""

from dataclasses import asdict
from typing import Any, get_args

import msgspec

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.frontend.http.base import HttpRequest, Responder
from headwater.frontend.http.replies import JSON, reply_for
from headwater.frontend.openai.parse import Shape, parse_body, short_json
from headwater.frontend.planning import ModelPlan, Planning
from headwater.frontend.routes import Route
from headwater.planner.decide import Decision
from headwater.planner.pool import WorkerModel
from headwater.types import Role


class _PlanBody(msgspec.Struct):
    roles: dict[str, str] | None


_PLAN = Shape.of(_PlanBody, {})
_ROLES: tuple[Role, ...] = get_args(Role)


class PlanPages:
    def __init__(self, planning: Planning) -> None:
        self._planning = planning

    def routes(self) -> list[Route]:
        return [Route("GET", "/debug/plan", self._serve), Route("POST", "/admin/plan", self._set)]

    def _serve(self, _request: HttpRequest, responder: Responder) -> None:
        responder.send(200, (JSON, (b"cache-control", b"no-store")), msgspec.json.encode(self.document()))

    def _set(self, request: HttpRequest, responder: Responder) -> None:
        try:
            self.set(request.body)
        except HeadwaterError as error:
            reply_for(error).send_to(responder)
        else:
            responder.send(202, (JSON,), msgspec.json.encode({"pinned": self._planning.pinned}))

    def set(self, body: bytes) -> None:
        """Raises `InvalidRequest`."""
        roles = parse_body(_PLAN, body, strict=True).fields.roles
        if roles:
            self._planning.pin({worker_id: _role(worker_id, given) for worker_id, given in roles.items()})
        else:
            self._planning.unpin()

    def document(self) -> dict[str, Any]:
        models = {fingerprint: _described(kept) for fingerprint, kept in self._planning.plans.items()}
        believed = {name: list(map(_worker, pool)) for name, pool in self._planning.believed().items()}
        return {"models": models, "pinned": self._planning.pinned, "believed": believed}


def _role(worker_id: str, given: str) -> Role:
    for role in _ROLES:
        if role == given:
            return role
    raise InvalidRequest(
        f"roles has {short_json(given)} for {short_json(worker_id)}, expected one of {', '.join(_ROLES)}", param="roles"
    )


def _worker(model: WorkerModel) -> dict[str, Any]:
    """Enough to simulate it: `headwater advise --running` does."""
    return {
        "class": model.name,
        "curve": asdict(model.curve),
        "kv_tokens": model.kv_tokens,
        "chunk_tokens": model.chunk_tokens,
        "max_num_seqs": model.max_num_seqs,
        "link_bytes_per_ms": model.link_bytes_per_ms,
        "kv_bytes_per_token": model.kv_bytes_per_token,
    }


def _described(kept: ModelPlan) -> dict[str, Any]:
    plan = kept.planner.plan
    return {
        "roles": dict(zip(kept.workers, plan.roles, strict=True)),
        "loose": plan.loose,
        "changes": kept.num_changes,
        "last": _decision(kept.last),
        "scored": _decision(kept.scored),
    }


def _decision(decision: Decision | None) -> dict[str, Any] | None:
    if decision is None:
        return None
    summary = decision.summary
    return {
        "plan": decision.plan.describe(),
        "changed": decision.changed,
        "reason": decision.reason,
        "correction": {"prefill": decision.correction.prefill, "decode": decision.correction.decode},
        "traffic": None if summary is None else asdict(summary),
        "candidates": [
            {
                "plan": plan.describe(),
                "attained": score.attained,
                "secured": score.secured,
                "e2e_ms": _finite(score.e2e_ms),
                "ttft_ms": _finite(score.ttft_ms),
                "tpot_ms": _finite(score.tpot_ms),
            }
            for plan, score in decision.scores.items()
        ],
    }


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
