"""Pass bytes between a client and a server, and look at none: the least that a process in between adds.

    python -m benchmarks.record.relay --port 8000        # prints the port that it listens on

A loop over epoll. What is more than this is what a tap spends on reading HTTP, and on asyncio.
"""

import argparse
import select
import socket
import sys
from collections.abc import Sequence

READ = 1 << 16


def relay(listener: socket.socket, server: tuple[str, int]) -> None:
    """Connect each client to the server, until the process is ended."""
    epoll, other = select.epoll(), dict[int, socket.socket]()
    epoll.register(listener, select.EPOLLIN)
    while True:
        for number, _ in epoll.poll():
            if number == listener.fileno():
                _join(listener.accept()[0], socket.create_connection(server), epoll, other)
            elif (end := other.get(number)) is not None:
                _pass(other[end.fileno()], end, epoll, other)


def _join(client: socket.socket, server: socket.socket, epoll: select.epoll, other: dict[int, socket.socket]) -> None:
    other[client.fileno()], other[server.fileno()] = server, client
    for side in (client, server):
        side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        epoll.register(side, select.EPOLLIN)


def _pass(came: socket.socket, end: socket.socket, epoll: select.epoll, other: dict[int, socket.socket]) -> None:
    """Hand on what is there of a connection; close both where one has ended."""
    try:
        if data := came.recv(READ):
            end.sendall(data)
            return
    except OSError:
        pass
    for side in (came, end):
        epoll.unregister(side)
        del other[side.fileno()]
        side.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Listen, say where, and relay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="of the server, on this host")
    options = parser.parse_args(argv)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        relay(listener, ("127.0.0.1", options.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
