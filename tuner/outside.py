"""Text that comes from outside is data: no secret is passed on in it, and nothing that a terminal obeys.

A server prints what it likes, and what it printed is kept, shown and published. Known as secrets are the values of
the environment's variables that are called so (`SECRET`) from eight characters on, and passwords in addresses.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

SECRET = re.compile(
    r"(^|_)(TOKENS?|AUTH|API_?KEYS?|KEYS?|SECRETS?|PWD|CREDENTIALS?)$|(PASSWORD|PASSWD|PASSPHRASE|CONNECTION_STRING)$",
    re.IGNORECASE,
)
# To the last @ of the word: a password may hold @ and /.
WITH_PASSWORD = re.compile(r"(?<=://)(?:[^\s/:@]*:\S*|[^\s/:]+)@")
PARAMETER = re.compile(r"(?i)([?&]\w*(?:password|passwd|pwd|token|secret|key|odbc_connect)\w*=)[^&\s]*")
SHORTEST = 8  # what is shorter stands in too many other words
NOT_SECRET = ("PWD", "OLDPWD")  # the shell's working folders
BLOT = "***"


def blotted(text: str) -> str:
    """Return a text with its secrets replaced."""
    for secret in _secrets():
        text = text.replace(secret, BLOT)
    return PARAMETER.sub(rf"\1{BLOT}", WITH_PASSWORD.sub(f"{BLOT}@", text))


def blot_file(path: Path) -> None:
    """Write stars over the secrets in a file, in place: it may still be open for writing, and needs no more disk."""
    if not path.is_file():
        return
    words = [re.escape(secret.encode()) for secret in _secrets()]
    secret = re.compile(b"|".join([*words, WITH_PASSWORD.pattern.encode()]))
    with path.open("r+b") as file:
        for match in secret.finditer(file.read()):
            file.seek(match.start())
            file.write(b"*" * len(match[0]))


def _secrets() -> list[str]:
    """Return what must not be passed on, in each spelling, longest first."""
    found = {form for value in _values() for form in (value, quote(value, safe=""), unquote(value), _in_json(value))}
    return sorted((form for form in found if len(form) >= SHORTEST), key=len, reverse=True)


def _values() -> Iterator[str]:
    for name, value in os.environ.items():
        if SECRET.search(name) and name not in NOT_SECRET:
            yield value
        for match in WITH_PASSWORD.finditer(value):
            yield match[0].rstrip("@").partition(":")[2]


def _in_json(value: str) -> str:
    return json.dumps(value)[1:-1]


def legible(text: str) -> str:
    """Return a text without characters that a terminal obeys; its lines are kept."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def without_secret(uri: str) -> str:
    """Return an address without what it may carry of a user, a password, or a secret among its parameters."""
    return PARAMETER.sub(rf"\1{BLOT}", WITH_PASSWORD.sub("", uri))
