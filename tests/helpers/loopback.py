"""HTTP servers for the duration of a block, on loopback by default."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore lost connections: clients are killed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def answering(
    handler: type[BaseHTTPRequestHandler], port: int = 0, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Answer with `handler` during the block, each connection in a thread; yield the URL.

    Port 0 is any free port.
    """
    server = _Server((host, port), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
