"""Ask a server that is there already: which models it serves, and whether it has counters.

Before the clock starts only. Plain HTTP with a deadline, past any proxy.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tuner.errors import HostError, SpecError
from tuner.outside import WITH_PASSWORD, blotted
from tuner.replay.connection import authorization
from tuner.replay.stream import LONGEST_MESSAGE, MOST_OF_AN_ERROR
from tuner.serving import Json

DEADLINE = 10.0
MOST_BYTES = 1 << 22

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Served:
    """A model as the server lists it; root is where it was loaded from, both "" and None are not said."""

    name: str
    root: str = ""
    max_model_len: int | None = None


def base_of(url: str, flag: str = "--url", *, keys: str = "a key goes into VLLM_API_KEY or OPENAI_API_KEY") -> str:
    """Return the URL that a flag gave, without /v1; `keys` says where one goes that is not to be in it.

    Raises:
        SpecError: not a URL that requests can go to.
    """
    if WITH_PASSWORD.search(url):
        raise SpecError(
            f"{flag}: it has a user in it, and whoever lists processes reads it", hint=f"leave it out; {keys}"
        )
    base = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(base)
        is_fine = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        is_fine = is_fine and not (parts.query or parts.fragment)  # no path goes behind those, and keys stand there
    except ValueError:
        is_fine = False
    if not is_fine:
        raise SpecError(f"{flag} {url}: not a URL of a server", hint=f"write for example {flag} http://127.0.0.1:8000")
    return base


def models(base: str, *, deadline: float = DEADLINE) -> tuple[Served, ...]:
    """Return the models that a server offers.

    Raises:
        HostError: nobody answers, or not as an OpenAI-compatible server does.
    """
    try:
        listed = ask(f"{base}/v1/models", deadline=deadline)["data"]
        return tuple(_served(model) for model in listed)
    except (KeyError, TypeError, AttributeError) as error:
        raise HostError(f"{base}/v1/models: not the answer of an OpenAI-compatible server") from error


def _served(model: dict[str, Any]) -> Served:
    longest = model.get("max_model_len")
    return Served(str(model["id"]), str(model.get("root") or ""), longest if isinstance(longest, int) else None)


def choose(offered: tuple[Served, ...], name: str | None) -> Served:
    """Return the model that is meant.

    Raises:
        SpecError: there is no such model, or several and no name; lists them.
    """
    listed = ", ".join(model.name for model in offered) or "none"
    if name is None and len(offered) == 1:
        return offered[0]
    if name is None:
        raise SpecError(f"--model is needed: the server offers {len(offered)} models", hint=f"one of: {listed}")
    if (found := next((model for model in offered if model.name == name), None)) is None:
        raise SpecError(f"--model {name}: the server does not offer it", hint=f"it offers: {listed}")
    return found


def has_counters(base: str, *, deadline: float = DEADLINE) -> bool:
    """Return whether the server has a metrics endpoint of Prometheus' form."""
    try:
        return b"# TYPE" in _fetch(f"{base}/metrics", None, deadline)
    except (OSError, http.client.HTTPException):
        return False


def ask(url: str, body: Mapping[str, Json] | None = None, *, deadline: float = DEADLINE) -> Any:
    """Return the JSON that a server answers, to a GET or, with a body, to a POST.

    Raises:
        HostError: no answer within the deadline, an error, or no JSON; says what the server said.
    """
    try:
        return json.loads(_fetch(url, body, deadline))
    except urllib.error.HTTPError as error:
        said = ""
        with suppress(OSError, http.client.HTTPException):  # it broke off in the middle of its error
            said = blotted(" ".join(error.read(MOST_OF_AN_ERROR).decode(errors="replace").split()))[:LONGEST_MESSAGE]
        hint = "set VLLM_API_KEY or OPENAI_API_KEY" if error.code in {401, 403} else None
        raise HostError(f"{url}: the server answers {error.code}: {said}", hint=hint) from error
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise HostError(f"{url}: nobody answers: {why}", hint="is the server up, and --url right?") from error
    except (ValueError, RecursionError) as error:
        raise HostError(f"{url}: the answer is not JSON", hint="is this an OpenAI-compatible server?") from error


def _fetch(url: str, body: Mapping[str, Json] | None, deadline: float) -> bytes:
    headers = {"Content-Type": "application/json"} | authorization()
    data = None if body is None else json.dumps(body).encode()
    until = time.monotonic() + deadline
    text = b""
    with _DIRECT.open(urllib.request.Request(url, data, headers), timeout=deadline) as answer:  # noqa: S310 (base_of)
        while len(text) < MOST_BYTES and (part := answer.read1(65536)):
            text += part
            if time.monotonic() > until:  # the timeout is one of each read
                raise TimeoutError(f"not whole after {deadline:g} s")
    return text
