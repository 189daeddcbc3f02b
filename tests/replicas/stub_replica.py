"""A program that answers as a replica does, by the words of the prompt; it knows nothing of the project.

Started as ``stub_replica.py NAME NOTES --fd N --ends-with-stdin``; appends a line to the file NOTES when it
sees a caller leave.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME, NOTES = sys.argv[1], sys.argv[2]
FD = int(sys.argv[sys.argv.index("--fd") + 1])
USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
STATS = {"model": "stub", "num_open": 1, "max_open": 8}


class Handler(BaseHTTPRequestHandler):
    """One call."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Say nothing."""

    def do_GET(self):
        """Answer what the front process asks."""
        texts = {
            "/metrics": b'# TYPE steps_total counter\nsteps_total{phase="p"} 3.0\n',
            "/stats": json.dumps({**STATS, "key": self.headers.get("authorization")}).encode(),
        }
        self.whole(200, texts.get(self.path, NAME.encode()), "text/plain")

    def do_POST(self):
        """Answer a call."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        words = body["prompt"].split()
        if "die" in words:
            os.kill(os.getpid(), signal.SIGKILL)
        if "full" in words or f"full{NAME}" in words:
            self.whole(429, b'{"error": {"code": "rate_limit"}}', "application/json", {"Retry-After": "7"})
        elif body.get("stream"):
            self.stream(words)
        elif "cut" in words:
            self.head(200, "application/json", {"Content-Length": "100"})
            self.wfile.write(b'{"choices"')
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            answer = {"replica": NAME, "key": self.headers.get("authorization"), "usage": USAGE}
            named = {"X-Request-Id": self.headers["x-request-id"] + "!"}
            self.whole(200, json.dumps(answer).encode(), "application/json", named)

    def whole(self, status, body, kind, more=None):
        """Send a whole body."""
        self.head(status, kind, {"Content-Length": str(len(body)), **(more or {})})
        self.wfile.write(body)

    def head(self, status, kind, more):
        """Send status and headers."""
        self.send_response(status)
        self.close_connection = True
        for name, value in {"Content-Type": kind, "Connection": "close", **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def stream(self, words):
        """Send events: three, or without end, or with an end that is none."""
        self.head(200, "text/event-stream", {"Transfer-Encoding": "chunked"})
        number = 0
        try:
            while number < 3 or "endless" in words:
                self.chunk(b'data: {"number":%d,"replica":"%s"}\n\n' % (number, NAME.encode()))
                number += 1
                if "endless" in words:
                    time.sleep(0.02)
            while "wait" in words and "go on" not in Path(NOTES).read_text():
                time.sleep(0.01)
            if "break" in words:
                self.chunk(b'data: {"number":')
                os.kill(os.getpid(), signal.SIGKILL)
            if "short" in words:
                self.wfile.write(b"0\r\n\r\n")
                return
            if "failed" in words:
                self.chunk(b'data: {"error":{"code":"internal_error"}}\n\n')
            else:
                self.chunk(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"usage": USAGE}).encode())
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            with open(NOTES, "a") as notes:
                notes.write(f"{NAME} was left\n")

    def chunk(self, data):
        """Send a chunk."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    """Listens on the socket that was handed over."""

    daemon_threads = False

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = socket.socket(fileno=FD)
        self.server_address = self.socket.getsockname()
        self.server_activate()


server = Server()
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())


def end_with_stdin():
    """End when whoever started this is gone."""
    sys.stdin.buffer.read()
    os._exit(0)


threading.Thread(target=end_with_stdin, daemon=True).start()
server.serve_forever(poll_interval=0.02)
server.server_close()  # waits for calls under way
os._exit(0)
