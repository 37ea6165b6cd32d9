"""Count tokens as a model does: the tokenizer that the user names, loaded by the library `tokenizers`.

The library is imported here only, and this module only when a tokenizer is named.
"""

from collections.abc import Sequence
from pathlib import Path

from tuner.errors import SpecError
from tuner.readers.format import Tokenize

FILE = "tokenizer.json"


def load(name: str) -> Tokenize:
    """Return the function from a text to its token ids, without the special tokens that a server adds.

    Args:
        name: a tokenizer.json, a folder that holds one, or a model's name on the hub, which is downloaded where it
            is not in the hub's cache.

    Raises:
        SpecError: the library is missing, or there is no such tokenizer, or it cannot be read.
    """
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 (the only user of an optional library)
    except ImportError as error:
        raise SpecError(
            "--tokenizer: the library tokenizers is not installed", hint="pip install tokenizers (vLLM brings it)"
        ) from error
    try:
        file = _file(name)
        tokenizer = Tokenizer.from_pretrained(name) if file is None else Tokenizer.from_file(str(file))
    except SpecError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise SpecError(
            f"--tokenizer {name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint=f"name a folder with a {FILE}, that file, or a model on the hub that can be reached",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def tokenize(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return tokenize


def _file(name: str) -> Path | None:
    """Return the file that a path means; None when it is no path, so a name.

    Raises:
        SpecError: the folder has none, or the path is one that is not there.
    """
    path = Path(name)
    if path.is_dir():
        if (path / FILE).is_file():
            return path / FILE
        raise SpecError(f"--tokenizer {name}: no {FILE} in this folder", hint="a model's folder has one")
    if path.is_file():
        return path
    if name.startswith((".", "/", "~")) or path.suffix == ".json":
        raise SpecError(f"--tokenizer {name}: no such file or folder", hint=f"name a folder with a {FILE}")
    return None
