"""A Hugging Face hub on 127.0.0.1: what its client needs to list a repository and fetch its files."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repositories by id: file name -> content. `cut_after`: bytes of a file's body before the line goes dead, once."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    cut_after: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, Range header) of every request."""
    failing: bool = False
    """Answer everything with 503."""
    url: str = ""

    def fetched(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/([^/]+)|/tree/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if self.hub.failing:
            self._refuse(503, "")
        elif listing:
            self._list(listing[1], listing[3] or listing[4], tree=bool(listing[4]))
        elif file:
            self._file(file[1], file[2], file[3], body=body)
        else:
            self._refuse(404, "EntryNotFound")

    def _list(self, repo: str, revision: str | None, *, tree: bool) -> None:
        files = self.hub.repositories.get(repo)
        if repo in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if files is None:
            return self._refuse(404, "RepoNotFound")
        if revision not in (None, "main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if tree:
            entries = [{"type": "file", "path": n, "size": len(c), "oid": _etag(c)} for n, c in files.items()]
            return self._send(json.dumps(entries).encode())
        siblings = [{"rfilename": name} for name in files]
        info = {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False}
        return self._send(json.dumps(info | {"tags": [], "downloads": 0, "likes": 0}).encode())

    def _file(self, repo: str, revision: str, name: str, *, body: bool) -> None:
        content = self.hub.repositories.get(repo, {}).get(name)
        if content is None or revision != COMMIT:
            return self._refuse(404, "EntryNotFound")
        start = int(m[1]) if (m := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if body:
            stop = self.hub.cut_after.pop(name, len(content))
            self.wfile.write(content[start:stop])
            if stop < len(content):
                self.close_connection = True
        return None

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
