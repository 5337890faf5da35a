"""Role plans as data: what each worker of a pool does, and which plans are worth trying.

`both` everywhere is the aggregated cluster. A split gives every worker one phase. A loose plan lets the price of one
request leave its split: decode workers may prefill what is cheaper there, prefill workers may keep what they computed.

Workers that are alike are exchangeable, so that of each class only numbers matter: of a class of n workers, the first
ones by place prefill. Prefill for others is done by workers of role `prefill` only, and these hold no room for
others: what waits for room waits for computation, never the other way round, so no circle of reservations can form.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from headwater.types import Role

MAX_PLANS = 200
"""That are tried, about: of large pools every few."""


@dataclass(frozen=True, slots=True)
class RolePlan:
    """What every worker of a pool does, in the pool's order."""

    roles: tuple[Role, ...]
    loose: bool = False
    """Whether a request may leave the plan where that is cheaper for all."""

    @property
    def aggregated(self) -> bool:
        return all(role == "both" for role in self.roles)

    @property
    def complete(self) -> bool:
        """Whether both phases are done by somebody, and prefill workers have someone to prefill for."""
        decoding = any(role != "prefill" for role in self.roles)
        return decoding and any(role != "decode" for role in self.roles)

    def describe(self, names: Sequence[str] = ()) -> str:
        """In words: `2 x TP1 prefill + 1 x TP2 decode`."""
        if self.aggregated:
            return f"{len(self.roles)} aggregated"
        counted: dict[tuple[str, str], int] = {}
        for number, role in enumerate(self.roles):
            key = (role, names[number] if names else "")
            counted[key] = counted.get(key, 0) + 1
        order: tuple[Role, ...] = ("prefill", "both", "decode")
        parts = [
            f"{count} {f'{name} ' if name else ''}{role}"
            for wanted in order
            for (role, name), count in counted.items()
            if role == wanted
        ]
        return " + ".join(parts) + (" (loose)" if self.loose else "")


def aggregated(num_workers: int) -> RolePlan:
    both: Role = "both"
    return RolePlan((both,) * num_workers)


def candidates(classes: Sequence[str], fixed: Sequence[Role | None] = ()) -> Iterator[RolePlan]:
    """All-aggregated, then every split into prefill and decode, for workers of these classes.

    `fixed`: the role of each worker that cannot change it. Plans in which one phase is done by nobody are left out, and
    of large pools all but about `MAX_PLANS`, evenly spread.
    """
    fixed = fixed or (None,) * len(classes)
    both: Role = "both"
    whole = RolePlan(tuple(role or both for role in fixed))
    if whole.complete:
        yield whole
    free = [name for name, role in zip(classes, fixed, strict=True) if role is None]
    names = list(dict.fromkeys(free))
    most = max(2, int(MAX_PLANS ** (1 / max(1, len(names)))))
    for counts in product(*[_counts(free.count(name), most) for name in names]):
        plan = _split(classes, fixed, dict(zip(names, counts, strict=True)))
        if plan.complete and not plan.aggregated and plan != whole:
            yield plan


def _counts(size: int, most: int) -> list[int]:
    """How many of a class may prefill: from none to all, `most` different numbers at most."""
    if size < most:
        return list(range(size + 1))
    return sorted({round(size * number / (most - 1)) for number in range(most)})


def _split(classes: Sequence[str], fixed: Sequence[Role | None], num_prefill: dict[str, int]) -> RolePlan:
    roles: list[Role] = []
    for name, role in zip(classes, fixed, strict=True):
        if role is None:
            role = "prefill" if num_prefill[name] > 0 else "decode"
            num_prefill[name] -= 1
        roles.append(role)
    return RolePlan(tuple(roles))


def loosened(plan: RolePlan) -> RolePlan | None:
    """The same roles, left where the price says so; None where there is nothing to leave."""
    return None if "prefill" not in plan.roles or plan.loose else RolePlan(plan.roles, loose=True)
