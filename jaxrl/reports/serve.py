"""HTTP server of the page, for this machine only; the page is rebuilt when runs have changed."""

import hashlib
import re
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from jaxrl.errors import JaxrlError, SettingsError
from jaxrl.paths import reason_of_path
from jaxrl.reports.read import films_of
from jaxrl.training.storage.run_dir import CONFIG, EPISODES, MEMBERS, MEMBERS_FILE, METADATA, METRICS, population_dir

HOST = "127.0.0.1"
OURS = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")
"""`Host` headers of requests from browsers on this machine."""


def stamp_of(paths: Iterable[str]) -> str:
    """Return a digest that changes with any file that is read from the runs at `paths`."""
    digest = hashlib.sha256()
    for path in map(Path, paths):
        # The files of a member are those of its population.
        own = [(population_dir(path) or path) / name for name in (CONFIG, METADATA, MEMBERS_FILE, METRICS, EPISODES)]
        films = [film for folder in (path, *sorted((path / MEMBERS).glob("*"))) for film in films_of(folder)]
        for file in (*own, *films):
            digest.update(f"{file} {_state(file)}\n".encode())
    return digest.hexdigest()[:16]


def _state(file: Path) -> str:
    try:
        info = file.stat()
    except OSError:
        return "-"
    return f"{info.st_size} {info.st_mtime_ns}"


class Pages:
    """Cache of the page, rebuilt when the runs have changed."""

    def __init__(self, paths: list[str], build: Callable[[str], str]) -> None:
        self._paths, self._build = paths, build
        self._lock = threading.Lock()
        self._stamp, self._built, self._page = "", "", b""

    def stamp(self) -> str:
        """Return the stamp of the page that `page` returns now."""
        self.page()
        return self._built

    def page(self) -> bytes:
        """Return the current page of the runs, or the previous one if a run can no longer be read."""
        # Each request has a thread; only one of them builds the page.
        with self._lock:
            stamp = stamp_of(self._paths)
            if stamp != self._stamp or not self._page:
                try:
                    self._page, self._built = self._build(stamp).encode(), stamp
                # A run may be in the middle of a write: keep the previous page until the next change.
                except JaxrlError:
                    if not self._page:
                        raise
                self._stamp = stamp
            return self._page


def server(port: int, pages: Pages) -> ThreadingHTTPServer:
    """Return a server of the page, not yet running; raise `SettingsError` if the port is not available."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site could read the page by a host name that it resolves to this machine (DNS rebinding).
            if not OURS.fullmatch(self.headers.get("Host", "")):
                self._answer(403, "text/plain", b"ask for 127.0.0.1\n")
            elif self.path == "/stamp":
                self._answer(200, "text/plain", pages.stamp().encode())
            elif self.path == "/":
                self._answer(200, "text/html; charset=utf-8", pages.page())
            else:
                self._answer(404, "text/plain", b"there is one page: /\n")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Discard the access log."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:  # the browser has disconnected
                self.close_connection = True

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        reason = reason_of_path(error)
        raise SettingsError(f"cannot serve on port {port}: {reason}; choose another: --serve PORT") from error


def serve(port: int, pages: Pages, ready: Callable[[str], None]) -> None:
    """Serve the page until the process ends; call `ready` with its URL once it is built."""
    httpd = server(port, pages)
    pages.page()
    ready(f"http://{HOST}:{httpd.server_port}/")
    httpd.serve_forever()
