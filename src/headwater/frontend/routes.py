"""From method and path to a handler.

A path may end in `/{name}`, which takes the rest of the path, slashes included (model names have them). HEAD is
answered as GET. What is not there is 404, a method that is not offered is 405 with `allow`; both in the API's error
shape.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headwater.frontend.http.base import Handler, HttpRequest
from headwater.frontend.http.replies import Reply, error_reply
from headwater.frontend.tenants.keyring import Scope


@dataclass(frozen=True, slots=True)
class Route:
    """One entry of the table."""

    method: str
    path: str
    handler: Handler
    scope: Scope | None = "admin"
    """What a key must be good for; None: answered without one."""
    generates: bool = False
    """Counts against the limit of concurrent requests, and gets a log line at level info."""


class RouteTable:
    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: list[tuple[str, str, dict[str, Route]]] = []
        for route in routes:
            self._add(route)

    def find(self, request: HttpRequest) -> Route | Reply:
        """The route, with the request's path parameters filled in; or the answer that there is none."""
        by_method = self._exact.get(request.path) or self._match(request)
        if by_method is None:
            return error_reply(404, f"there is nothing at {request.path[:200]}", code="not_found")
        route = by_method.get("GET" if request.method == "HEAD" else request.method)
        if route is not None:
            return route
        allowed = ", ".join(sorted(by_method))
        message = f"{request.method} is not offered at {request.path[:200]}; {allowed} is"
        reply = error_reply(405, message, code="method_not_allowed")
        return Reply(reply.status, (*reply.headers, (b"allow", allowed.encode())), reply.body)

    def _add(self, route: Route) -> None:
        prefix, brace, parameter = route.path.partition("{")
        if not brace:
            by_method = self._exact.setdefault(route.path, {})
        else:
            by_method = {}
            for known_prefix, _, known in self._prefixes:
                if known_prefix == prefix:
                    by_method = known
            if not by_method:
                self._prefixes.append((prefix, parameter.rstrip("}"), by_method))
                self._prefixes.sort(key=lambda entry: -len(entry[0]))
        if route.method in by_method:
            raise ValueError(f"two handlers for {route.method} {route.path}")
        by_method[route.method] = route

    def _match(self, request: HttpRequest) -> dict[str, Route] | None:
        for prefix, parameter, by_method in self._prefixes:
            if request.path.startswith(prefix) and len(request.path) > len(prefix):
                request.path_params = {parameter: request.path[len(prefix) :]}
                return by_method
        return None
