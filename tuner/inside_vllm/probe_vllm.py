"""Ask the installed vLLM what it is, which flags it takes and what it makes of some command lines.

Run by deployment/probe.py as a program, with the Python that `vllm` itself runs under:

    python probe_vllm.py REQUEST.json ANSWER.json

REQUEST holds {"argvs": [["MODEL", "--max-num-seqs", "8"], ...]}. ANSWER holds the version, the platform,
the flags of `vllm serve` and, for each argv, the reason for refusing it or the values it resolves to. Nothing
is started; one run costs about what `vllm --version` costs. Standard output belongs to vLLM's log.

The parser is the one of the `serve` sub-command itself, so vllm 0.26 (vllm.entrypoints.openai.cli_args) and
0.32 (vllm.entrypoints.launchers.cli_args) need no distinction here.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import vllm
from vllm import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

# Where the engine's own configuration keeps the value that an argument resolves to.
RESOLVED = {
    "async_scheduling": "scheduler_config.async_scheduling",
    "block_size": "cache_config.block_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "dtype": "model_config.dtype",
    "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "enforce_eager": "model_config.enforce_eager",
    "gpu_memory_utilization": "cache_config.gpu_memory_utilization",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "long_prefill_token_threshold": "scheduler_config.long_prefill_token_threshold",
    "max_long_partial_prefills": "scheduler_config.max_long_partial_prefills",
    "max_model_len": "model_config.max_model_len",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "max_num_partial_prefills": "scheduler_config.max_num_partial_prefills",
    "max_num_scheduled_tokens": "scheduler_config.max_num_scheduled_tokens",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "num_gpu_blocks_override": "cache_config.num_gpu_blocks_override",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "quantization": "model_config.quantization",
    "scheduling_policy": "scheduler_config.policy",
    "stream_interval": "scheduler_config.stream_interval",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
}


class RefusedError(Exception):
    """The parser says no; the message is its own."""


def _refuse(_parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise RefusedError(message)


def serve_parsers() -> tuple[FlexibleArgumentParser, FlexibleArgumentParser]:
    """Return the parser of `vllm` and, inside it, the one of `vllm serve`."""
    root = FlexibleArgumentParser(prog="vllm")
    serve = ServeSubcommand().subparser_init(root.add_subparsers(dest="subparser"))
    return root, serve


def describe_flags(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Return one entry a flag: its name, kind, choices and default."""
    flags = []
    for action in parser._actions:  # noqa: SLF001 (argparse offers no public listing)
        names = [name for name in action.option_strings if name.startswith("--")]
        if not names or names[0] == "--help":
            continue
        default = action.default
        flags.append(
            {
                "name": names[0][2:].replace("-", "_"),
                "kind": _kind(action),
                "choices": [plain(choice) for choice in action.choices or ()],
                "default": None if default is argparse.SUPPRESS else plain(default),
            }
        )
    return flags


def _kind(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "bool"
    convert = _innermost(action.type)
    name = "json" if convert is json.loads else getattr(convert, "__name__", "str")
    kind = {"human_readable_int": "int", "human_readable_int_or_auto": "int", "parse_dataclass": "json"}.get(name, name)
    kind = kind if kind in {"int", "float", "str", "json"} else "str"
    return f"list[{kind}]" if action.nargs in {"+", "*"} else kind


def _innermost(convert: Any) -> Any:
    """Return what vLLM's optional_type() and parse_type() were wrapped around."""
    while closure := getattr(convert, "__closure__", None):
        wrapped = [cell.cell_contents for cell in closure if callable(cell.cell_contents)]
        if not wrapped or convert.__name__ not in {"_optional_type", "_parse_type"}:
            break
        convert = wrapped[0]
    return convert


def plain(value: Any) -> Any:
    """Return a value as JSON holds it; what JSON cannot hold becomes text."""
    if value is None or isinstance(value, bool | int | float | str):
        return getattr(value, "value", value)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(getattr(value, "value", value))


def judge(parser: FlexibleArgumentParser, argv: list[str]) -> dict[str, Any]:
    """Return {"values": ...} for a command line vLLM takes, {"reason": ...} for one it refuses."""
    try:
        args = parser.parse_args(["serve", *argv])
        if getattr(args, "model_tag", None) is not None:
            args.model = args.model_tag
        ServeSubcommand().validate(args)
        engine = AsyncEngineArgs.from_cli_args(args)
        config = engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # noqa: BLE001 (whatever vLLM raises here is its reason)
        return {"reason": str(error) or type(error).__name__, "error": type(error).__name__}
    except SystemExit as error:
        return {"reason": f"exit {error.code}", "error": "SystemExit"}
    return {"values": {name: plain(value) for name, value in _resolved(config).items()}}


def _resolved(config: Any) -> dict[str, Any]:
    values = {}
    for name, path in RESOLVED.items():
        value = config
        for part in path.split("."):
            value = getattr(value, part, None)
        if value is not None:
            values[name] = str(value).removeprefix("torch.") if name == "dtype" else value
    values["vocab_size"] = config.model_config.get_vocab_size()
    return values


def main() -> None:
    """Read the request, write the answer."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    setattr(argparse.ArgumentParser, "error", _refuse)  # noqa: B010 (mypy forbids plain assignment)
    root, serve = serve_parsers()
    answer = {
        "version": vllm.__version__,
        "platform": current_platform.device_type,
        "flags": describe_flags(serve),
        "verdicts": [judge(root, argv) for argv in request["argvs"]],
    }
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
