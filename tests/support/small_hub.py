"""A hub of models on the loopback: as much of Hugging Face's as a download needs."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "1" * 40


@dataclass
class SmallHub:
    """The hub's files, and its requests: `gated` models need `token`, which is no one's otherwise.

    The first answer with a file of `broken_off` ends in its middle.
    """

    models: Mapping[str, Path]  # folders by ORG/NAME
    gated: frozenset[str] = frozenset()
    token: str = "a-token"
    broken_off: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)  # paths of GET requests
    ranges: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def small_hub(hub: SmallHub) -> Iterator[SmallHub]:
    """Serve a hub until the context ends, and set its address."""

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: SmallHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in the base class
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.served.asked.append(urlsplit(self.path).path)
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        kind, revision, *rest = parts[4:] if is_api else parts[2:]
        folder = self.served.models.get(name)
        if folder is None:
            self._refuse(404, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif kind == "revision":
            self._send_json({"id": name, "sha": COMMIT, "siblings": []})
        elif kind == "tree":
            self._send_json(
                [
                    {
                        "type": "file",
                        "path": str(path.relative_to(folder)),
                        "size": path.stat().st_size,
                        "oid": _etag(path),
                    }
                    for path in sorted(folder.rglob("*"))
                    if path.is_file()
                ]
            )
        elif name in self.served.gated and self.headers["Authorization"] != f"Bearer {self.served.token}":
            self._refuse(403, "GatedRepo")
        else:
            self._send_file(folder.joinpath(*rest))

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send_file(self, path: Path) -> None:
        content = path.read_bytes()
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if (asked := self.headers["Range"]) is not None:
            self.served.ranges.append(asked)
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self._send(206, content[first:], headers)
        elif self.command == "GET" and path.name in self.served.broken_off:
            self.served.broken_off.remove(path.name)
            self._send(200, content, headers, num_sent=len(content) // 2)
            self.close_connection = True
        else:
            self._send(200, content, headers)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], num_sent: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:num_sent])


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
