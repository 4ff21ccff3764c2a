"""Take the pictures of the page: engine.gif, engine.png and page.png.

    PYTHONPATH=python:tests python docs/images/record.py docs/images   # needs chromium and Pillow

For engine.gif a server with the built-in model gets twenty streaming chats that begin with the same long system prompt,
one every 0.08 s, and each new view of the page's Engine tab is a frame. engine.png has six of them.
"""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from pathlib import Path

import httpx
from PIL import Image

from e2e.browser import Browser
from e2e.harness import ServerProcess

SIZE, ENGINE_SIZE, PAGE_SIZE = (960, 1240), (1180, 1520), (1180, 760)
FRAME_MS = 250
LAST_FRAME_MS = 3000
RULES = " ".join(
    f"Rule {n}: write short, simple sentences, name the {animal} in each of them, and end the story well."
    for n, animal in enumerate(["fox", "owl", "cat", "hen", "dog", "bee", "cow", "ant"] * 4, 1)
)
NAMES = ["Lily", "Tom", "Anna", "Ben", "Mia", "Max", "Zoe", "Sam", "Eva", "Leo"]
NAMES += ["Ida", "Tim", "Amy", "Jon", "Kim", "Rob", "Sue", "Pat", "Liz", "Ned"]
FASTER = "const wait = setTimeout; window.setTimeout = (f, ms) => wait(f, ms === 1000 ? 100 : ms); 0"


def chat(url: str, name: str, tokens: int = 160) -> None:
    """Stream one answer of so many tokens to its end."""
    messages = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": f"Tell me a story about a fox named {name}."},
    ]
    body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
        for _ in response.iter_lines():
            pass


def slow_server(num_pages: int) -> ServerProcess:
    """One that can be watched."""
    flags = ("--view-texts", "--num-pages", str(num_pages), "--page-size", "16", "--threads", "1")
    return ServerProcess(*flags, env={"MINISGL_CHECK": "0"})


def record(path: Path) -> None:
    """The Engine view while twenty requests come and go."""
    frames: list[Image.Image] = []
    with slow_server(600) as server, Browser() as browser:
        server.wait_ready()
        chat(server.url, "Sun")
        httpx.post(f"{server.url}/flush_cache", json={})
        browser.look(*SIZE)
        browser.open(server.url)
        browser.evaluate(FASTER)
        browser.evaluate("$('tab-engine').click()")
        threads = [threading.Thread(target=chat, args=(server.url, name)) for name in NAMES]

        def send_all() -> None:
            for thread in threads:
                thread.start()
                time.sleep(0.08)

        sender = threading.Thread(target=send_all)
        picture = Path(server.run_base) / "frame.png"
        after = 6
        while after:
            browser.screenshot(picture)
            image = Image.open(io.BytesIO(picture.read_bytes())).convert("RGB")
            if not frames or image.tobytes() != frames[-1].tobytes():
                frames.append(image)
            if len(frames) == 3 and sender.ident is None:
                sender.start()
            elif sender.ident is not None and not sender.is_alive() and not any(t.is_alive() for t in threads):
                after -= 1
            time.sleep(0.1)
    save(frames, path)


def take(browser: Browser, path: Path) -> None:
    """A picture in 256 colours."""
    browser.screenshot(path)
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def take_pictures(folder: Path) -> None:
    """The chat, and the Engine view with six requests."""
    with slow_server(4096) as server, Browser() as browser:
        browser.look(*PAGE_SIZE)
        browser.open(server.url)
        browser.evaluate("$('temperature').value = 0")
        for number, question in enumerate(("What is 12 + 30?", "My name is Anna.", "What is my name?"), 1):
            browser.evaluate(f"send({json.dumps(question)})")
            browser.wait(f"turns.length === {2 * number} && !running")
        browser.evaluate("$('prompt').focus()")
        take(browser, folder / "page.png")
        browser.look(*ENGINE_SIZE)
        httpx.post(f"{server.url}/flush_cache", json={})
        chat(server.url, "Sun")
        browser.evaluate(FASTER)
        browser.evaluate("$('tab-engine').click()")
        threads = [threading.Thread(target=chat, args=(server.url, name, 800)) for name in NAMES[:6]]
        for thread in threads:
            thread.start()
            time.sleep(0.08)
        browser.wait("$('batch').children.length === 6 && $('running').textContent === '6'")
        take(browser, folder / "engine.png")
        for thread in threads:
            thread.join()


def save(frames: list[Image.Image], path: Path) -> None:
    """Write the frames with one palette of 64 colours, taken from the busiest frame."""
    busiest = max(frames, key=lambda frame: len(frame.getcolors(1 << 20) or []))
    palette = busiest.quantize(64, dither=Image.Dither.NONE)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [FRAME_MS] * (len(small) - 1) + [LAST_FRAME_MS]
    small[0].save(path, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True)
    print(json.dumps({"frames": len(frames), "bytes": path.stat().st_size}))


if __name__ == "__main__":
    record(Path(sys.argv[1]) / "engine.gif")
    take_pictures(Path(sys.argv[1]))
