"""What the tests of several tools share: a package index on this machine, and nobody's settings."""

from __future__ import annotations

import base64
import gc
import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts import SELDOM

gc.set_threshold(SELDOM)  # as in a command


@dataclass
class LocalIndex:
    """An index (PEP 503) that serves `files`, and misbehaves where a test says so."""

    files: dict[str, bytes] = field(default_factory=dict)
    stated: dict[str, str | None] = field(default_factory=dict)
    """sha256 on the page where it is not the file's own; None: the page states none."""
    yanked: dict[str, str] = field(default_factory=dict)
    behaviour: dict[str, str] = field(default_factory=dict)
    """Per file: cut (ends early), cut-unsized (and had no length), stall, moved, gone."""
    login: str | None = None
    """`user:password` without which every answer is 401."""
    requests: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    """Ends the stalls."""
    url: str = ""

    def transfers(self, name: str) -> int:
        """Count the requests for one file."""
        return self.requests.count(f"/files/{name}")

    def page(self) -> bytes:
        lines = []
        for name, content in self.files.items():
            stated = self.stated.get(name, hashlib.sha256(content).hexdigest())
            fragment = f"#sha256={stated}" if stated else ""
            yanked = f' data-yanked="{self.yanked[name]}"' if name in self.yanked else ""
            lines.append(f'<a href="/files/{name}{fragment}"{yanked}>{name}</a><br/>')
        return "\n".join(("<!DOCTYPE html><html><body>", *lines, "</body></html>")).encode()


def _handler(index: LocalIndex) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            index.requests.append(self.path)
            if index.login is not None:
                wanted = "Basic " + base64.b64encode(index.login.encode()).decode()
                if self.headers["Authorization"] != wanted:
                    self.send_error(401)
                    return
            name = self.path.rpartition("/")[2]
            if self.path == "/simple/vllm/":
                self.answer(index.page(), "text/html")
            elif name in index.files:
                self.file(name, index.files[name], index.behaviour.get(name, ""))
            else:
                self.send_error(404)

        def file(self, name: str, content: bytes, behaviour: str) -> None:
            if behaviour == "gone":
                self.send_error(503)
            elif behaviour == "moved" and self.path.startswith("/files/"):
                self.send_response(302)
                self.send_header("Location", f"/elsewhere/{name}")
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif behaviour.startswith("cut"):
                self.send_response(200)
                if behaviour == "cut":
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
            elif behaviour == "stall":
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                index.released.wait(30)
                self.close_connection = True
            else:
                self.answer(content, "application/octet-stream")

        def answer(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay silent about clients that a test has killed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide the machine's pip, uv and proxy settings; return a new folder for the test's own.

    It is the home, the configuration folder and the working directory; the cache is below it.
    """
    hidden = ("PIP_", "UV_", "KVFIX_")
    for name in list(os.environ):
        if name.startswith(hidden) or name.upper().endswith(("_PROXY", "_CA_BUNDLE")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # what the machine's own files say
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("KVFIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def local_index() -> Iterator[LocalIndex]:
    """Serve a package index on this machine; no tool is told of it yet (see its `url`)."""
    index = LocalIndex()
    server = _Server(("127.0.0.1", 0), _handler(index))
    index.url = f"http://127.0.0.1:{server.server_address[1]}/simple/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield index
    finally:
        index.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def pip_index(
    no_settings: Path, local_index: LocalIndex, monkeypatch: pytest.MonkeyPatch
) -> LocalIndex:
    """Serve a package index that pip's environment names as the only one."""
    monkeypatch.setenv("PIP_INDEX_URL", local_index.url)
    return local_index
