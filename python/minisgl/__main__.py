"""Serve a language model, or talk to one. Without MODEL, the built-in demo model is used.

minisgl serve                         the built-in model on http://127.0.0.1:1919 (OpenAI's API)
minisgl serve ~/models/Qwen3-0.6B     a folder in Hugging Face's layout
minisgl chat                          chat in this terminal
minisgl generate "Once upon a time"   answer prompts and exit; no server
minisgl bench offline                 measure the engine; `minisgl bench online` measures any server
minisgl verify ~/models/Qwen3-0.6B    check that this machine computes a checkpoint correctly
minisgl quantize IN OUT --scheme fp8  write a checkpoint with half of the bytes, or with int4 a quarter
minisgl replay FILE                   run the scheduler again that `minisgl serve --record FILE` has recorded
minisgl doctor ~/models/Qwen3-0.6B    report what this machine can run, and why not the rest; for bug reports, too

minisgl serve --help                  list the flags that most people use, as for every command; --help-all lists all

Each option can also be set by an environment variable, for example MINISGL_PORT=8000. Most flags of vLLM and SGLang
work, or lead to ours. `--log-level DEBUG` shows details. Without a command, flags are those of `serve`:
`python -m minisgl --model X` serves X.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from dataclasses import asdict
from inspect import getdoc
from pathlib import Path
from typing import Any

import minisgl
from minisgl.core.errors import ConfigError, MinisglError
from minisgl.process.log import tell
from minisgl.settings.foreign import foreign
from minisgl.settings.options import SchedulerConfig, build_config
from minisgl.settings.sources import (
    Parser,
    add_model_argument,
    add_options,
    args_from_options,
    as_typed,
    engine_options,
    given_options,
    server_options,
)
from minisgl.tools.bench.command import add_bench, run_bench


def _parser() -> Parser:
    parser = Parser(prog="minisgl", description=__doc__)
    parser.add_argument("--version", action="version", version=minisgl.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="serve a model over HTTP")
    add_model_argument(serve)
    serve.add_argument("--shell", "--shell-mode", action="store_true", help="also chat with the model in this terminal")
    add_options(serve)

    chat = commands.add_parser("chat", help="chat with a model in the terminal")
    add_model_argument(chat)
    chat.add_argument("--url", help="talk to this running server instead of starting one")
    _add_sampling(chat, default_temperature=None)
    chat.add_argument("--system", help="system prompt")
    add_options(chat)

    generate = commands.add_parser("generate", help="answer prompts offline and exit")
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to continue, or with --chat a question")
    generate.add_argument("--chat", action="store_true", help="put each prompt through the chat template")
    _add_sampling(generate, default_temperature=0.0)
    add_options(generate, SchedulerConfig)

    add_bench(commands)
    verify = commands.add_parser("verify", help="check a model's logits", description=getdoc(_verify))
    add_model_argument(verify)
    verify.add_argument("--length", type=int, default=192, help="tokens of the longest text (default: %(default)s)")
    verify.add_argument("--json", metavar="FILE", help="write the table to this file as well")
    add_options(verify, SchedulerConfig)
    quantize = commands.add_parser("quantize", help="write a checkpoint with fewer bits", description=getdoc(_quantize))
    quantize.add_argument("input", metavar="IN", help="the checkpoint; '' for the built-in model")
    quantize.add_argument("output", metavar="OUT", type=Path, help="the folder to write; it must not exist yet")
    quantize.add_argument("--scheme", choices=("fp8", "int8", "int4"), required=True, help="see above")
    replay = commands.add_parser("replay", help="run a recorded scheduler again", description=getdoc(_replay))
    replay.add_argument("file", metavar="FILE", help="what `minisgl serve --record FILE` has written")
    replay.add_argument("--port", type=int, help="then show each step in a browser (0: any port)")
    doctor = commands.add_parser("doctor", aliases=["env"], help="report what this machine and a model need and allow")
    add_model_argument(doctor)
    add_options(doctor)
    return parser


def _add_sampling(parser: argparse.ArgumentParser, default_temperature: float | None) -> None:
    help = "sampling temperature, 0 = greedy (default: the model's in a chat, else 0)"
    parser.add_argument("--temperature", type=float, default=default_temperature, help=help)
    parser.add_argument("--max-tokens", type=int, help="maximum length of an answer (default: the context)")


def _serve(options: argparse.Namespace) -> int:
    from minisgl.launch.launch import launch_server

    args = args_from_options(given_options(options))
    if options.shell:
        from minisgl.tools.chat.shell import chat_with_own_server

        return chat_with_own_server(args, {}, None)
    return launch_server(args)


def _chat(options: argparse.Namespace) -> int:
    from minisgl.tools.chat.client import running_server
    from minisgl.tools.chat.shell import chat_with_own_server, chat_with_url

    chosen = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    sampling = {name: value for name, value in chosen.items() if value is not None}
    given = given_options(options)
    if options.url is not None:
        if extra := given.keys() - {"api_key"}:
            raise ConfigError(
                f"--url uses a running server and allows only --api-key: leave out {', '.join(sorted(extra))}"
            )
        return chat_with_url(options.url, given.get("api_key"), sampling, options.system)
    wanted = server_options(given)
    if wanted.get("port") != 0 and wanted.keys() <= {"model", "host", "port", "api_key", "api_key_file"}:
        args = args_from_options(given)
        key = next(iter(args.load_keys() or []), None)
        model, patience = args.scheduler.engine.model, args.ready_timeout
        if (url := running_server(args.host, args.port, model, key, patience)) is not None:
            print("minisgl: using the server that runs on this port; --port 0 starts another one", file=sys.stderr)
            return chat_with_url(url, key, sampling, options.system)
    return chat_with_own_server(args_from_options({"port": 0} | given), sampling, options.system)


def _engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's options. Raises `ConfigError` before torch is imported if they do not fit this machine."""
    given = engine_options(given_options(options))
    from minisgl.engine.fit import check_fit

    check_fit(build_config(SchedulerConfig, given).engine)
    return given


def _generate(options: argparse.Namespace) -> int:
    given = _engine_options(options)
    from minisgl import LLM, SamplingParams

    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    llm = LLM(given.pop("model", ""), **given)
    if options.chat:
        completions = llm.chat([[{"role": "user", "content": p}] for p in options.prompts], params)
    else:
        completions = llm.generate(options.prompts, params)
    for completion in completions:
        print(completion.text)
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Check that this machine computes a checkpoint correctly, and exit with 1 if not. Logits are compared with those
    of transformers (`pip install 'minisgl[verify]'`) in prefill, chunks, decode, after a shared prefix and in mixed
    batches. Greedy outputs are compared with those of the same engine with a filled prefix cache, with and without
    overlap and CUDA graphs. In float32, logits must agree to 1e-4 of the largest logit; in other types, as closely
    as transformers agrees with itself. docs/models.md explains the limits.

      minisgl verify ~/models/Qwen3-0.6B                    the same computation as `minisgl serve`
      minisgl verify ~/models/Qwen3-0.6B --dtype float32    the strictest comparison
      minisgl verify ~/models/Qwen3-32B --tp 4              also compare four ranks with one
      minisgl verify ~/models/Qwen3-8B --quantization fp8   compare fewer bits with the same engine in bf16
    """
    from minisgl.tools.bench.report import check_writable, write_json

    check_writable(options.json, "--json")
    given = _engine_options(options)
    from minisgl.tools.verify.command import verify, verify_table

    results = verify(given, options.length)
    print(verify_table(results))
    if options.json is not None:
        write_json(options.json, {"checks": [asdict(result) for result in results]})
    return int(any(result.passed is False for result in results))


def _quantize(options: argparse.Namespace) -> int:
    """Write the checkpoint IN (a folder, or a name on the Hugging Face hub) into the new folder OUT, with fewer bits
    for the projections of its layers. Embeddings, norms, routers and the head stay as they are. The layouts are
    published ones, which transformers and vLLM read, too.

      fp8    E4M3 with a scale for 128 x 128 weights (quant_method fp8)
      int8   8-bit integers with a scale for each row (compressed-tensors, W8A8)
      int4   4-bit integers with a scale for 128 weights, or fewer where the model needs it (compressed-tensors, W4A16)
    """
    from minisgl.models.quantize import quantize

    before, after = quantize(options.input, options.output, options.scheme)
    print(f"{options.output}: {after / 1e6:,.1f} MB of tensors instead of {before / 1e6:,.1f} MB")
    return 0


def _replay(options: argparse.Namespace) -> int:
    """Run the scheduler of a record again, without model or GPU, and exit with 1 if it makes another plan than the
    recorded one. With --port the page's Engine view shows each step.
    """
    from minisgl.tools.replay import check, serve

    steps = check(options.file)
    print(f"{steps:,} steps, and the same plans")
    if options.port is not None:
        serve(options.file, steps, options.port)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from minisgl.launch.doctor import examine

    return examine(args_from_options(given_options(options)))


COMMANDS = {
    "serve": _serve,
    "chat": _chat,
    "generate": _generate,
    "bench": run_bench,
    "verify": _verify,
    "quantize": _quantize,
    "replay": _replay,
    "doctor": _doctor,
    "env": _doctor,
}


def _is_flag_or_model(word: str) -> bool:
    return word.startswith("-") or "/" in word or ":" in word or Path(word).exists() or word.endswith(".gguf")


def _adapt_to_surroundings() -> None:
    """Open standard streams that are closed, and let stdout take every character, as stderr does.

    Raises `ConfigError` in a folder that has been deleted, where nothing can be imported.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a socket gets the number of a stream
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115 (None if it was closed)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder does not exist any more; change to another one") from None


def main(argv: list[str] | None = None) -> int:
    """Run a command. Return the exit code: 0 = done, 1 = failed, 2 = the command line or settings cannot work."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(__doc__, end="")
        return 0
    # `python -m minisgl --model X` and a model alone start a server; a mistyped command does not.
    if argv[0] not in (*COMMANDS, *foreign().commands, "-h", "--help", "--version") and _is_flag_or_model(argv[0]):
        argv = ["serve", *argv]
    options = argparse.Namespace()
    try:
        _adapt_to_surroundings()
        _parser().parse_args(argv, options)
        tell(f"{options.command} is starting")
        return COMMANDS[options.command](options)
    except MinisglError as e:
        print(f"minisgl: {as_typed(e, options)}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    except OSError as e:  # a full disk, or no more files or processes
        print(f"minisgl: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
