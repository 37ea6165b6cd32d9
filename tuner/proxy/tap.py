"""Pass requests through to a server and its answers back, byte for byte, as they come.

Nothing waits for a whole body, and nothing is added: what goes to the server is what came, less the headers that
belong to one connection (RFC 9110, 7.6.1). A slow reader slows its own answer only, since each part is handed on
before the next is read. A client that leaves takes its request with it, at once.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from tuner.proxy.asked import endpoint_of
from tuner.proxy.exchange import Allowance, Exchange

CONNECT_TIMEOUT = 30.0
# vLLM closes idle connections after 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request on one that it just closed is lost.
KEEP_ALIVE = 3.0
MOST_OF_A_LINE = 1 << 16  # bytes of a header
SHORT = 1 << 16  # bytes of a request that are sent in one piece
MOST_HEADERS = 1024

HOP_BY_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
              "trailer", "transfer-encoding", "upgrade"}  # fmt: skip
OURS = {"host", "expect"}  # said anew to the server by the client's side of this tap
SAID_BY_AIOHTTP = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # unless told not to

AS_IS = "surrogateescape"

CANCELLED = "cancelled by the client"
CUT_OFF = "cut off when the recorder ended"
UNREACHABLE = "the server could not be reached"
BROKE_OFF = "the server broke off"

clock = time.perf_counter


class _WithoutRequests(logging.Filter):
    """Drops what aiohttp says of a request that is no HTTP: it quotes it, with keys and prompts."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_LOG = logging.getLogger(__name__)
_LOG.addFilter(_WithoutRequests())


def onward(came: web.BaseRequest | aiohttp.ClientResponse, without: AbstractSet[str] = frozenset()) -> CIMultiDict[str]:
    """Return the headers that are for the other end: in order, repeated ones too, in the spelling they came in."""
    named = {name.strip().lower() for name in ",".join(came.headers.getall("Connection", [])).split(",")}
    left_out = HOP_BY_HOP | named | without
    told = ((name.decode(errors=AS_IS), value.decode(errors=AS_IS)) for name, value in came.raw_headers)
    return CIMultiDict((name, value) for name, value in told if name.lower() not in left_out)


def session() -> aiohttp.ClientSession:
    """Return what sends requests on: no proxies, no cookies, no limit on connections or on an answer's time."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE), auto_decompress=False, trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
        max_line_size=MOST_OF_A_LINE, max_field_size=MOST_OF_A_LINE, skip_auto_headers=SAID_BY_AIOHTTP,
    )  # fmt: skip


class Tap:
    """What happens to each request.

    Args:
        http: sends requests on.
        upstream: the server's URL, without a path's end.
        begun, ended: told of each request when it came and when the last of its answer was handed on, or it failed.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        upstream: str,
        begun: Callable[[Exchange], None],
        ended: Callable[[Exchange], None],
    ) -> None:
        self.http, self.upstream, self._begun, self._ended = http, upstream, begun, ended
        self.is_ending = self.is_cut = False
        self.open: set[Exchange] = set()
        self._allowance = Allowance()
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.server = web.Server(
            self._handle, handler_cancellation=True, auto_decompress=False, access_log=None, logger=_LOG,
            max_line_size=MOST_OF_A_LINE, max_field_size=MOST_OF_A_LINE, max_headers=MOST_HEADERS,
        )  # fmt: skip

    async def drained(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        exchange = self._begin(request)
        try:
            return await self._pass(request, exchange)
        except asyncio.CancelledError:
            exchange.left(CUT_OFF if self.is_cut else CANCELLED)
            raise
        finally:
            exchange.ended = exchange.ended or clock()
            self.open.discard(exchange)
            if not self.open:
                self._idle.set()
            self._ended(exchange)

    def _begin(self, request: web.BaseRequest) -> Exchange:
        arrival, endpoint = clock(), endpoint_of(request.method, request.path)
        self._count += endpoint is not None
        exchange = Exchange(self._count, endpoint, arrival, request.headers, self._allowance)
        self.open.add(exchange)
        self._idle.clear()
        self._begun(exchange)
        return exchange

    async def _pass(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return _error(501, "tune record passes no websockets through")
        if request.raw_path == "*":
            return _error(501, "tune record passes no request on that names no path")
        try:
            answer = await self._ask(request, exchange)
        except (aiohttp.ClientError, OSError) as error:
            exchange.fail(UNREACHABLE)
            return _error(502, f"tune record: no answer from {self.upstream}: {str(error) or type(error).__name__}")
        try:
            return await self._answer(request, exchange, answer)
        finally:
            answer.close()  # no more than a formality where it was read to its end

    async def _ask(self, request: web.BaseRequest, exchange: Exchange) -> aiohttp.ClientResponse:
        """Send the request on, its body as it comes."""
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        target = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
        return await self.http.request(
            request.method, URL(self.upstream + target, encoded=True), headers=onward(request, OURS),
            data=await _to_send(request, exchange), allow_redirects=False,
        )  # fmt: skip

    async def _answer(
        self, request: web.BaseRequest, exchange: Exchange, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        """Hand the answer on, each part when it is there."""
        exchange.answering(answer.status, answer.headers)
        response = _Passed(status=answer.status, reason=answer.reason, headers=onward(answer))
        if self.is_ending:
            response.force_close()
        try:
            await response.prepare(request)
            while data := await _next(answer):
                await response.write(data)
                exchange.answered(data)
            await response.write_eof()
        except aiohttp.ClientConnectionResetError:  # it left, and the task will be cancelled
            exchange.left(CANCELLED)
        except _BrokeOff:
            exchange.fail(BROKE_OFF)
            _break_off(request)
        exchange.ended = clock()
        return response


class _Passed(web.StreamResponse):
    """An answer whose headers are the server's, with none of aiohttp's own beside what frames it."""

    async def _prepare_headers(self) -> None:
        unsaid = [name for name in ("Content-Type", "Date", "Server") if name not in self.headers]
        await super()._prepare_headers()
        for name in unsaid:
            self.headers.pop(name, None)


class _BrokeOff(Exception):  # noqa: N818 (what happened)
    """The server ended an answer before its end."""


async def _next(answer: aiohttp.ClientResponse) -> bytes:
    """Return what is there of an answer, empty at its end.

    Raises:
        _BrokeOff: it ended in the middle.
    """
    try:
        return await answer.content.readany()
    except (aiohttp.ClientError, OSError) as error:
        raise _BrokeOff from error


async def _to_send(request: web.BaseRequest, exchange: Exchange) -> AsyncIterator[bytes] | bytes | None:
    """Return a request's body: as it comes, or at once where it is short, which saves a task and a write."""
    if not request.body_exists:
        return None
    if (request.content_length or SHORT + 1) > SHORT:
        return _body(request, exchange)
    body = await request.read()
    exchange.asked(body)
    return body


async def _body(request: web.BaseRequest, exchange: Exchange) -> AsyncIterator[bytes]:
    while data := await request.content.readany():
        exchange.asked(data)
        yield data


def _break_off(request: web.BaseRequest) -> None:
    """End an answer where the server ended it: without the end that HTTP asks for."""
    if request.transport is not None:
        request.transport.close()


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "tune_record", "param": None, "code": status}}
    return web.Response(status=status, body=json.dumps(body).encode(), content_type="application/json")
