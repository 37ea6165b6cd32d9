"""What a request asks for, as far as a workload needs it: read after the request has ended, from the bytes it had."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tuner.workload import TokenId

COMPLETIONS, CHAT, RESPONSES = "completions", "chat", "responses"
PATHS = {"/chat/completions": CHAT, "/completions": COMPLETIONS, "/responses": RESPONSES}

SEVERAL = "several prompts or answers in one request"
NOT_TEXT = "content that is not text, such as images or audio"
EMBEDDED = "prompt embeddings"
SERVER_TOOLS = "tools that the server runs itself"
NOT_READ = "the request is not JSON of this endpoint"

TEXT_PARTS = {"text", "input_text", "output_text", "refusal", "thinking"}
# What vLLM's /tokenize takes of a chat request as it is.
OF_THE_TEMPLATE = ("messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
                   "chat_template", "mm_processor_kwargs")  # fmt: skip

Json = dict[str, Any]


class Unreplayable(Exception):  # noqa: N818 (a fact about a request, and no error)
    """A request that a row of a workload cannot stand for; the message is the reason that is counted."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation as it is compared: what an answer says comes back in the next request."""

    role: str
    text: str
    calls: tuple[str, ...] = ()

    def encoded(self) -> bytes:
        """Return the bytes that stand for it; clients may strip an answer before they send it back."""
        text = self.text.strip() if self.role == "assistant" else self.text
        return msgspec.json.encode((self.role, text, self.calls))


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of one prompt and one answer.

    Attributes:
        tokens: the prompt's ids, where the request has them.
        text: the prompt as text: a completion's own; of a chat all that is said, in a form of ours; None where a
            part of it is kept by the server.
        form: what to POST to /tokenize for the prompt's ids; None where that is not known.
        messages: of a chat; empty for a completion.
        previous: the answer that a request of the responses API goes on from.
    """

    endpoint: str
    model: str | None
    tokens: tuple[int, ...] | None
    text: str | None
    form: Json | None
    messages: tuple[Message, ...] = ()
    previous: str | None = None


def endpoint_of(method: str, path: str) -> str | None:
    """Return which of the three endpoints that make tokens is asked, if any."""
    path = path.partition("?")[0]
    return next((name for end, name in PATHS.items() if method == "POST" and path.endswith(end)), None)


def read(endpoint: str, body: bytes) -> Asked:
    """Return what a request asks for.

    Raises:
        Unreplayable: a workload's row cannot stand for it.
    """
    try:
        said = msgspec.json.decode(body)
        if not isinstance(said, dict):
            raise Unreplayable(NOT_READ)
        if any((said.get(name) or 1) > 1 for name in ("n", "best_of")) or said.get("use_beam_search"):
            raise Unreplayable(SEVERAL)
        return {COMPLETIONS: _completion, CHAT: _chat, RESPONSES: _response}[endpoint](said)
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise Unreplayable(NOT_READ) from error


def _completion(said: Json) -> Asked:
    prompt = said.get("prompt")
    if said.get("prompt_embeds"):
        raise Unreplayable(EMBEDDED)
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise Unreplayable(SEVERAL)
        prompt = prompt[0]
    if isinstance(prompt, list):
        return Asked(COMPLETIONS, _model(said), msgspec.convert(prompt, tuple[TokenId, ...]), None, None)
    if not isinstance(prompt, str):
        raise Unreplayable(NOT_READ)
    form = {"prompt": prompt, "add_special_tokens": said.get("add_special_tokens", True), **_named(said)}
    return Asked(COMPLETIONS, _model(said), None, prompt, form)


def _chat(said: Json) -> Asked:
    form = {name: said[name] for name in OF_THE_TEMPLATE if said.get(name) is not None}
    form |= _template(said, said.get("reasoning_effort")) | _named(said)
    return _conversation(CHAT, said, said["messages"], form)


def _response(said: Json) -> Asked:
    if any(tool.get("type") != "function" for tool in said.get("tools") or ()):
        raise Unreplayable(SERVER_TOOLS)
    items = said["input"]
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if said.get("instructions"):
        items = [{"role": "system", "content": said["instructions"]}, *items]
    previous = said.get("previous_response_id")
    messages = [_as_chat(item) for item in items]
    is_plain = previous is None and all(messages) and not said.get("tools")
    form = {"messages": messages, **_template(said, (said.get("reasoning") or {}).get("effort")), **_named(said)}
    return _conversation(RESPONSES, said, items, form if is_plain else None, previous)


def _as_chat(item: Json) -> Json | None:
    """Return an input item of the responses API as a chat's message, None where it is none."""
    if item.get("type", "message") != "message":
        return None
    content = item.get("content")
    return {"role": item["role"], "content": content if isinstance(content, str) else "".join(_texts(content))}


def _conversation(endpoint: str, said: Json, items: Sequence[Json], form: Json | None, previous: Any = None) -> Asked:
    messages = tuple(_message(item) for item in items)
    tools = msgspec.json.encode(said["tools"], order="sorted").decode() if said.get("tools") else ""
    text = tools + "".join(f"{one.role}\n{one.text}\n" for one in messages)
    known = text if previous is None else None
    return Asked(endpoint, _model(said), None, known, form, messages, previous if isinstance(previous, str) else None)


def _message(item: Json) -> Message:
    if item.get("type", "message") != "message":  # a call of a function or its result
        return Message(str(item["type"]), msgspec.json.encode(item, order="sorted").decode())
    calls = tuple(str(call.get("id") or "") for call in item.get("tool_calls") or ())
    own = (str(item["tool_call_id"]),) if item.get("tool_call_id") else ()
    return Message(str(item["role"]), "".join(_texts(item.get("content"))), calls + own)


def _texts(content: Any) -> Iterator[str]:
    """Yield the text of a message's content.

    Raises:
        Unreplayable: there is more than text in it.
    """
    parts = [content] if isinstance(content, str) else content or []
    for part in parts:
        kind = "text" if isinstance(part, str) else part.get("type", "text")
        if kind not in TEXT_PARTS:
            raise Unreplayable(NOT_TEXT)
        yield part if isinstance(part, str) else str(part.get("text") or part.get(kind) or "")


def _template(said: Json, effort: Any) -> Json:
    """Return the arguments that vLLM gives to the chat template beside those that are asked for."""
    given: Mapping[str, Any] = said.get("chat_template_kwargs") or {}
    more = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    more |= {"documents": said["documents"]} if said.get("documents") else {}
    return {"chat_template_kwargs": {**more, **given}} if more or given else {}


def _named(said: Json) -> Json:
    return {} if _model(said) is None else {"model": said["model"]}


def _model(said: Json) -> str | None:
    model = said.get("model")
    return model if isinstance(model, str) else None
