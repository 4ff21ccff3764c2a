"""Start a server, ask it a few questions over HTTP, show the streamed answers, stop it.

    python examples/demo.py [--model FOLDER] [any flag of `minisgl serve`]

The client here is our own small one; the official `openai` client works the same way with
`OpenAI(base_url=url + "/v1", api_key="none")`.
"""

from __future__ import annotations

import sys
import time

from minisgl.core.errors import ConfigError, MinisglError
from minisgl.launch.launch import background_server
from minisgl.settings.sources import parse_args
from minisgl.tools.chat.client import ChatClient

CONVERSATIONS = [
    ["Hello! Who are you?"],
    ["What is 12 + 30?"],
    ["My name is Anna.", "What is my name?"],
    ["Tell me a story about a cat named Tom."],
]


def main() -> int:
    try:
        args = parse_args(["--port", "0", *sys.argv[1:]], prog="demo.py")
        started = time.monotonic()
        with background_server(args) as url:
            print(f"the server is ready on {url} after {time.monotonic() - started:.1f} s\n")
            client = ChatClient(url, args.api_key)
            for questions in CONVERSATIONS:
                talk(client, questions)
    except MinisglError as e:
        print(f"demo: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    return 0


def talk(client: ChatClient, questions: list[str]) -> None:
    """One conversation, each answer printed as it comes, with its speed."""
    messages = []
    for question in questions:
        print(f"you:   {question}")
        print("model: ", end="")
        messages.append({"role": "user", "content": question})
        answer = ""
        for delta in client.stream_chat(messages, temperature=0, max_tokens=200):
            print(delta.text, end="", flush=True)
            answer += "" if delta.is_reasoning else delta.text
        messages.append({"role": "assistant", "content": answer})
        timing = client.account["timing"]
        print(
            f"\n       [first token after {timing['ttft_ms']:.0f} ms, then {timing['tokens_per_s'] or 0:.0f} tokens/s]"
        )
    print()


if __name__ == "__main__":
    sys.exit(main())
