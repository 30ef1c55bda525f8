"""A stand-in for the hub on this machine: it knows the models that it is given, by name, and hands out their files."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = hashlib.sha1(b"the only one", usedforsecurity=False).hexdigest()


@contextmanager
def hub(models: Mapping[str, Path]) -> Iterator[str]:
    """Its address, for HF_ENDPOINT, while it is there. ``models``: folders by ``organization/name``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, *_: Any) -> None: ...

        def _answer(self) -> None:
            path = self.path.partition("?")[0].strip("/").removeprefix("api/models/")
            name, what = "/".join(path.split("/")[:2]), path.split("/")[2:]
            match what:
                case _ if name not in models:
                    self._say(404, b"", {"X-Error-Code": "RepoNotFound"})
                case ["resolve", _, *file] if (found := models[name] / "/".join(file)).is_file():
                    self._say(200, found.read_bytes(), {})
                case [] | ["revision", _]:
                    siblings = [{"rfilename": each, **told} for each, told in _files(models[name]).items()]
                    self._json({"id": name, "sha": COMMIT, "siblings": siblings})
                case ["tree", *_]:
                    self._json([{"type": "file", "path": each, **size} for each, size in _files(models[name]).items()])
                case _:
                    self._say(404, b"", {"X-Error-Code": "EntryNotFound"})

        def _json(self, said: Any) -> None:
            self._say(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

        def _say(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            etag = hashlib.sha256(content).hexdigest()
            own = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(content))}
            for key, value in {**own, **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, name="hub", daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _files(folder: Path) -> dict[str, dict[str, Any]]:
    """What the hub tells of each of a model's files."""
    return {
        str(each.relative_to(folder)): {
            "size": each.stat().st_size,
            "oid": hashlib.sha256(each.read_bytes()).hexdigest()[:40],
        }
        for each in folder.rglob("*")
        if each.is_file()
    }
