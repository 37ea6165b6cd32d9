"""A fake server that tells everything it knows: its whole environment at start, and with each error its keys.

Its error bodies quote the request's prompt, as vLLM does with what it refuses.
"""

import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fake_vllm

KNOWN = " ".join(f"{name}={value}" for name, value in os.environ.items() if re.search("canary.of", value))
fake_vllm.REASONS["crash"] = f"RuntimeError: cannot reach the hub with {KNOWN}\x1b]0;pwned\x07\x1b[2J"
answer = fake_vllm.Connection.answer


def answer_with_everything(self: fake_vllm.Connection, status: int, content: object) -> None:
    if status >= 400 and self.stream is not None:
        prompt = bytes(byte % 256 for byte in self.stream.prompt).decode(errors="replace")
        message = f"input: {prompt} ".ljust(275, "x") + f" {KNOWN}"  # the first secret is cut in two by a limit of 300
        content = {"error": {"message": message, "body": json.dumps(self.stream.body)}}
    answer(self, status, content)


if __name__ == "__main__":
    fake_vllm.Connection.answer = answer_with_everything  # type: ignore[method-assign]
    if "--help=all" not in sys.argv and "--version" not in sys.argv:
        print(f"environment: {KNOWN}", file=sys.stderr, flush=True)
    fake_vllm.main(sys.argv[1:])
