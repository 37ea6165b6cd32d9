"""What of a logged prompt is text: a string, token ids, or the messages of a chat in the spellings that logs have.

OpenAI's messages (`content` a string or parts of `type` text) and those of OpenTelemetry's GenAI conventions (`parts`
with `content`); a JSON text inside a JSON string is looked into.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec

from tuner.readers.source import Damaged, Dropped
from tuner.workload import TokenId

MEDIA = "images, audio or files in the prompt"
SEVERAL_PROMPTS = "several prompts in one call"
TEXT = frozenset({"text", "input_text", "output_text", "reasoning", "refusal", "thinking", "summary_text"})
TOOLS = frozenset({
    "tool_call", "tool_call_response", "tool_use", "tool_result", "function_call", "function_call_output",
    "server_tool_use", "web_search_tool_result", "redacted_thinking",
})  # fmt: skip

TYPED, TYPED_IN_STRING = b'type"', b'type\\"'  # parts of other kinds than text say so
MESSAGE = frozenset({"role", "type"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text of a prompt.

    Attributes:
        texts: in order; each is tokenised for itself, so that a prompt that goes on has the same leading tokens.
        ids: token ids, where the log has those.
        is_chat: whether a template puts tokens around the texts.
        has_tools: whether tool calls, results or what is not shown are among them: their tokens are not certain.
    """

    texts: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    is_chat: bool = False
    has_tools: bool = False


class _Part(msgspec.Struct):
    type: str | None = None
    text: Any = None
    content: Any = None
    thinking: Any = None
    name: Any = None
    arguments: Any = None
    response: Any = None
    result: Any = None


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | list[_Part | str] | None = None
    parts: list[_Part] | None = None
    tool_calls: list[Any] | None = None
    type: str | None = None


def glanced(*places: msgspec.Raw, is_counted: bool) -> Prompt | None:
    """Return the prompt of the first place that has one, decoded only where it matters: for its text, or for media.

    Args:
        places: JSON that is not decoded yet, or empty.
        is_counted: whether the text matters.

    Raises:
        Dropped: it holds more than text, or is several prompts.
        Damaged: it is none.
    """
    for place in places:
        text = bytes(place)
        if text and text != b"null" and (is_counted or TYPED in text or TYPED_IN_STRING in text):
            found = prompt(msgspec.json.decode(text))
            if found is not None:
                return found
    return None


def prompt(logged: object) -> Prompt | None:
    """Return the prompt of a log, decoded or not; None where there is none.

    Raises:
        Dropped: it holds more than text, or is several prompts.
        Damaged: it is none.
    """
    if logged is None or logged == "":
        return None
    if isinstance(logged, str):
        return _in_string(logged)
    if isinstance(logged, dict):
        return _listed([logged]) if "role" in logged else prompt(logged.get("messages") or logged.get("prompt"))
    if not isinstance(logged, list):
        raise Damaged(f"a prompt must be text, token ids or messages, not {type(logged).__name__}")
    return _listed(logged)


def _in_string(text: str) -> Prompt | None:
    """Return the prompt of a string, which some exporters write messages into as JSON."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            found = msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError):
            found = None
        messages = found.get("messages") if isinstance(found, dict) else found
        if messages == [] or _are_messages(messages):
            return _listed(messages)
    return Prompt((text,))


def _are_messages(found: object) -> TypeGuard[list[Any]]:
    return isinstance(found, list) and bool(found) and all(isinstance(m, dict) and m.keys() & MESSAGE for m in found)


def _listed(elements: list[Any]) -> Prompt | None:
    if not elements:
        return None
    if all(isinstance(e, int) for e in elements):
        return Prompt(ids=tuple(msgspec.convert(elements, list[TokenId])))
    if isinstance(elements[0], str | list):
        if len(elements) > 1:
            raise Dropped(SEVERAL_PROMPTS)
        return prompt(elements[0])
    if isinstance(elements[0], dict) and "role" not in elements[0]:
        elements = [{"parts": elements}]
    messages = msgspec.convert(elements, list[_Message])
    pieces = [piece for message in messages for piece in _pieces(message)]
    return Prompt(tuple(text for text, _ in pieces), is_chat=True, has_tools=any(is_tool for _, is_tool in pieces))


def _pieces(message: _Message) -> Iterator[tuple[str, bool]]:
    """Yield a message's texts, and whether each belongs to a tool."""
    is_tool = message.role in ("tool", "function") or message.type in TOOLS
    if isinstance(message.content, str):
        yield message.content, is_tool
    else:
        for part in message.content or ():
            yield from [(part, is_tool)] if isinstance(part, str) else _piece(part)
    for part in message.parts or ():
        yield from _piece(part)
    for call in message.tool_calls or ():
        yield msgspec.json.encode(call).decode(), True
    if message.type in TOOLS:
        yield "", True


def _piece(part: _Part) -> Iterable[tuple[str, bool]]:
    if part.type in TOOLS:
        yield msgspec.json.encode(part).decode(), True
        return
    if part.type is not None and part.type not in TEXT:
        raise Dropped(MEDIA)
    text = next((text for text in (part.text, part.content, part.thinking) if text is not None), None)
    if not isinstance(text, str):
        raise Damaged("a text part of a message must have text")
    yield text, False
