"""Ask the server for a prompt's tokens, after its answer: vLLM's /tokenize, which others have too."""

import asyncio
from collections.abc import Mapping

import aiohttp
import msgspec

from tuner.proxy.asked import Json
from tuner.workload import TokenId

DEADLINE = 30.0  # seconds for one prompt
PROBE_DEADLINE = 10.0

NO_ANSWER = "the tokenizer did not answer"
REFUSED = "the tokenizer refused the prompt"


class Unknown(Exception):  # noqa: N818 (a fact about a prompt, and no error)
    """A prompt's tokens cannot be had; the message is the reason that is counted."""


class _Tokens(msgspec.Struct):
    tokens: list[TokenId]


async def ask(http: aiohttp.ClientSession, base: str, form: Json, headers: Mapping[str, str]) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        Unknown: the server does not say.
    """
    try:
        async with asyncio.timeout(DEADLINE):
            status, body = await _post(http, base, form, headers)
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
        raise Unknown(NO_ANSWER) from error
    if status != 200 or (tokens := _read(body)) is None:
        raise Unknown(REFUSED)
    return tokens


async def is_there(http: aiohttp.ClientSession, base: str) -> bool:
    """Return whether the server has a tokenizer that can be asked; where it wants a key, each request's is shown."""
    try:
        async with asyncio.timeout(PROBE_DEADLINE):
            status, body = await _post(http, base, {"prompt": "a"}, {})
    except (aiohttp.ClientError, OSError):
        return False
    return status in {401, 403} or (status == 200 and bool(_read(body)))


async def _post(http: aiohttp.ClientSession, base: str, form: Json, headers: Mapping[str, str]) -> tuple[int, bytes]:
    told = {**headers, "Content-Type": "application/json", "Accept-Encoding": "identity"}
    async with http.post(f"{base}/tokenize", data=msgspec.json.encode(form), headers=told) as answer:
        return answer.status, await answer.read()


def _read(body: bytes) -> list[int] | None:
    try:
        return msgspec.json.decode(body, type=_Tokens).tokens
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
