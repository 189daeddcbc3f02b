"""A Hugging Face hub of one model on this machine, as far as a download needs it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_of(
    name: str, directory: Path, revisions: tuple[str, ...] = ("main",), token: str | None = None
) -> Iterator[str]:
    """Serve the files of a directory as a model; yields the address of the hub.

    Args:
        revisions: names of its one commit.
        token: what a user must show; None lets everybody in.
    """
    files = {path.name: path.read_bytes() for path in directory.iterdir()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
                return self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            if not path.startswith((f"/api/models/{name}", f"/{name}/resolve/")):
                return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            revision, _, file = path.split(f"{name}/", 1)[1].partition("/")[2].partition("/")
            if revision not in (*revisions, COMMIT):
                return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if "/tree/" in path:
                tree = [{"type": "file", "path": n, "size": len(f), "oid": etag(f)} for n, f in files.items()]
                return self.answer(200, json.dumps(tree).encode())
            if path.startswith("/api/"):
                siblings = [{"rfilename": each} for each in files]
                return self.answer(
                    200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
                )
            if file not in files:
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return self.answer(200, files[file], {"ETag": f'"{etag(files[file])}"', "X-Repo-Commit": COMMIT})

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag(content: bytes) -> str:
    """An identity of a file's content."""
    return hashlib.sha1(content).hexdigest()
