"""Read streams with the least that Python can do: what no client can be more exact than on this machine.

A loop over epoll, a stamp a read, nothing parsed: where a stream ends is all that it looks for.
"""

import argparse
import gc
import json
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.replay.load import Seen, read_trace
from benchmarks.replay.server import END

LEAD = 0.1
READ = 1 << 16
COARSE = 0.002  # epoll waits whole milliseconds, and may be one late


def request(prompt_tokens: int, output_tokens: int) -> bytes:
    """Return a request as bytes."""
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": [7] * prompt_tokens,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: server\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(body) + body


@dataclass(slots=True)
class Flight:
    """One request under way."""

    row: int
    socket: socket.socket
    sent: float
    reads: list[float] = field(default_factory=list)


class Floor:
    """Sends a schedule to a server and stamps what comes back."""

    def __init__(self, port: int, rows: list[tuple[float, int, int]]) -> None:
        self.port, self.rows = port, rows
        self.epoll = select.epoll()
        self.idle: deque[socket.socket] = deque()
        self.flying: dict[int, Flight] = {}
        self.done: list[Flight] = []

    def run(self, deadline: float) -> Seen:
        """Send every row when it is due; wait for the answers until `deadline` seconds have passed."""
        bodies = {row[1:]: request(*row[1:]) for row in self.rows}
        gc.disable()
        anchor = time.perf_counter() + LEAD
        row, clock, poll = 0, time.perf_counter, self.epoll.poll
        while len(self.done) < len(self.rows):
            now = clock()
            if row < len(self.rows) and anchor + self.rows[row][0] <= now:
                self._send(row, bodies[self.rows[row][1:]])
                row += 1
                continue
            if now > anchor + deadline:
                raise SystemExit(f"{len(self.rows) - len(self.done)} requests did not end in {deadline:.0f} s")
            wait = anchor + self.rows[row][0] - now if row < len(self.rows) else 1.0
            if wait > COARSE:
                events = poll(wait - COARSE)
            elif select.select([self.epoll.fileno()], (), (), wait)[0]:
                events = poll(0)
            else:
                continue
            for number, _ in events:
                flight = self.flying[number]
                data = flight.socket.recv(READ)
                flight.reads.append(clock())
                if data.endswith(END) or not data:
                    self._end(flight, data)
        return self._seen(anchor)

    def _send(self, row: int, data: bytes) -> None:
        if self.idle:
            connection = self.idle.pop()
        else:
            connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.epoll.register(connection, select.EPOLLIN)
        self.flying[connection.fileno()] = Flight(row, connection, time.perf_counter())
        connection.send(data)

    def _end(self, flight: Flight, data: bytes) -> None:
        if not data:
            raise SystemExit("the server closed a connection")
        del self.flying[flight.socket.fileno()]
        self.idle.append(flight.socket)
        self.done.append(flight)

    def _seen(self, anchor: float) -> Seen:
        flights = sorted(self.done, key=lambda flight: flight.row)
        due = np.array([row[0] for row in self.rows]) + anchor
        sent = np.array([flight.sent for flight in flights])
        first = np.array([flight.reads[0] for flight in flights])
        return Seen(
            ttft=first - sent,
            gaps=np.concatenate([np.diff(flight.reads) for flight in flights]),
            lag=sent - due,
            offsets=np.concatenate([np.array(flight.reads) - flight.sent for flight in flights]),
            counts=np.array([len(flight.reads) for flight in flights], dtype=np.int64),
            ttft_from_due=first - due,
        )


def main() -> int:
    """Replay a trace and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds")
    options = parser.parse_args()
    Floor(options.port, list(read_trace(options.trace))).run(options.deadline).save(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
