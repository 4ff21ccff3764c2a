"""A server's record, replayed by the command and looked at in the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from e2e.browser import CHROMIUM, Browser
from e2e.harness import PATIENCE_S, ROOT, ServerProcess

REPLAY = [sys.executable, "-m", "minisgl", "replay"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "python"), "PYTHONUNBUFFERED": "1"}
BODIES = [
    {"prompt": "Once upon a time", "max_tokens": 40, "n": 3, "temperature": 1.0},
    {"prompt": "Once upon a time there was", "max_tokens": 20, "logprobs": 2, "echo": True},
    {"prompt": "A number: ", "max_tokens": 8, "guided_json": {"type": "integer"}},
    {"prompt": "Never", "max_tokens": 8, "guided_regex": "(" * 99},
    {"prompt": "The fox", "max_tokens": 30, "stop": ["fox"], "presence_penalty": 1.0, "logit_bias": {"5": 3}},
]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("replay") / "record")
    with ServerProcess("--record", path, "--num-pages", "300", "--threads", "1") as server:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http, ThreadPoolExecutor(5) as pool:
            list(pool.map(lambda body: http.post("/v1/completions", json=body), BODIES * 2))
        server.process.terminate()
        assert server.wait() == 0
    return path


def test_server_s_record_is_planned_alike(record: str) -> None:
    done = subprocess.run([*REPLAY, record], env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ steps, and the same plans\n", done.stdout)
    assert b"Once upon" not in Path(record).read_bytes()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the page is not tested")
def test_each_step_is_shown_in_the_engine_view(record: str) -> None:
    with subprocess.Popen([*REPLAY, record, "--port", "0"], env=ENVIRONMENT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert b"the same plans" in process.stdout.readline()
            url = process.stdout.readline().split()[-1].decode()
            with Browser() as browser:
                browser.open(url)
                browser.wait("!$('steps').hidden")
                steps = int(browser.evaluate("$('slider').max"))
                assert steps > 10 and browser.evaluate("$('tab-chat').hidden")
                views = [httpx.get(f"{url}/engine_view?step={step}").json()["view"] for step in range(steps)]
                rows = [len(view["requests"]) for view in views]
                busiest = rows.index(max(rows))
                assert rows[busiest] > 2
                browser.evaluate(f"$('slider').value = {busiest}; $('slider').dispatchEvent(new Event('input'))")
                browser.wait(f"$('step').textContent === '{busiest} of {steps}'")
                browser.wait(f"document.querySelectorAll('#batch .row').length === {rows[busiest]}")
                if folder := os.environ.get("MINISGL_SCREENSHOTS"):
                    browser.screenshot(Path(folder) / "replay.png")
                browser.evaluate(f"$('slider').value = {steps}; $('slider').dispatchEvent(new Event('input'))")
                browser.wait("document.querySelectorAll('#batch .row').length === 0")
                assert browser.problems == []
        finally:
            process.kill()
