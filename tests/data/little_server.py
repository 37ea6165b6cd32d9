"""A server for the tests of deployment/: `little_server.py serve MODEL --host H --port P`.

The environment variable LITTLE says how it behaves, `--behave` before it; see BEHAVIOURS at the end. As the
front of a group, `little_server.py serve front`, it takes any flag.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SLEEP = "import time; time.sleep(600)"
DEAF_SLEEP = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


class Handler(BaseHTTPRequestHandler):
    """Healthy; a GET of /die ends the server as if memory had run out."""

    def do_GET(self) -> None:
        """Answer."""
        if self.path == "/die":
            print(
                "(EngineCore pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
                flush=True,
            )
            os._exit(1)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


def serve() -> None:
    """Answer until told to end."""
    ThreadingHTTPServer((ARGS.host, ARGS.port), Handler).serve_forever()


def crash() -> None:
    """End at once, as vLLM does: the cause first, another error last."""
    print("(Worker pid=9) ERROR 11-29 20:41:34 [worker.py:9] ValueError: the cause", flush=True)
    print("(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(1)


def hang() -> None:
    """Never be ready, with a child."""
    print("INFO loading", flush=True)
    subprocess.Popen([sys.executable, "-c", SLEEP])
    time.sleep(600)


def deaf() -> None:
    """Serve, and ignore being asked to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve()


def escape() -> None:
    """Serve, with a child that left the session and is deaf, and one that lost its environment."""
    subprocess.Popen([sys.executable, "-c", DEAF_SLEEP], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", SLEEP], env={})
    serve()


def port_taken_at_first() -> None:
    """Find the port taken at the first try, and serve at the second."""
    first = Path(os.environ["LITTLE_FILE"])
    if not first.exists():
        first.touch()
        sys.exit("OSError: [Errno 98] Address already in use")
    serve()


def port_taken() -> None:
    """Find the port taken at every try."""
    with Path(os.environ["LITTLE_FILE"]).open("a") as tries:
        tries.write("x")
    sys.exit("OSError: [Errno 98] Address already in use")


def side_channel_taken_at_first() -> None:
    """Find a port of its own taken at the first try and hang, as vLLM does; serve at the second."""
    first = Path(os.environ["LITTLE_FILE"])
    if not first.exists():
        first.touch()
        print("(EngineCore pid=7) zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:1')", flush=True)
        time.sleep(600)
    serve()


def serve_and_die() -> None:
    """Be ready, and end for want of memory while others still start."""
    print("torch.OutOfMemoryError: CUDA out of memory.", flush=True)
    threading.Timer(1.0, os._exit, (1,)).start()
    serve()


BEHAVIOURS = {f.__name__: f for f in (serve, crash, hang, deaf, escape, port_taken_at_first, port_taken,
              side_channel_taken_at_first, serve_and_die)}  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs=2)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--behave", default=os.environ.get("LITTLE", "serve"))
    parser.add_argument("--kv-transfer-config")
    ARGS, rest = parser.parse_known_args()
    if rest and "front" not in ARGS.words:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    BEHAVIOURS[ARGS.behave]()
