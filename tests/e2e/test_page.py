"""The page in a real browser, against the real server with the built-in model."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.browser import CHROMIUM, SHIFT, Browser
from e2e.harness import ServerProcess, eventually, require_no_leak, stopped

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: the page is not tested")

PAGES = "['n-own', 'n-shared', 'n-cached', 'n-free']"
LAST = "[...document.querySelectorAll('.assistant')].at(-1)"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(chromium: Browser, server: ServerProcess) -> Iterator[Browser]:
    """The page, freshly loaded, with temperature 0; it must not log an error."""
    chromium.problems.clear()
    chromium.look(1180, 760)
    chromium.open(server.url)
    chromium.wait("$('model').textContent === 'minisgl-demo'")
    chromium.evaluate("localStorage.clear(); $('temperature').value = '0'; $('prompt').focus()")
    yield chromium
    assert chromium.problems == []


def ask(page: Browser, text: str) -> str:
    """The shown text of the answer."""
    page.evaluate("$('prompt').focus()")
    page.type(text)
    page.press("Enter")
    page.wait("!running")
    answer: str = page.evaluate(f"{LAST}.querySelector('.text').textContent")
    return answer


def save(page: Browser, name: str) -> None:
    """Save a screenshot in the folder MINISGL_SCREENSHOTS, if set."""
    if folder := os.environ.get("MINISGL_SCREENSHOTS"):
        page.screenshot(Path(folder) / f"{name}.png")


def foot(page: Browser) -> str:
    result: str = page.evaluate(f"{LAST}.querySelector('.foot').textContent")
    return result


def test_chat_keeps_the_conversation_and_shows_usage(page: Browser, server: ServerProcess) -> None:
    assert "Anna" not in ask(page, "What is 12 + 30?")
    assert "42" in page.evaluate("$('log').textContent")
    assert "tokens/s" in foot(page) and "first token after" in foot(page)
    ask(page, "My name is Anna.")
    assert "Anna" in ask(page, "What is my name?")
    cached = re.search(r"(\d+) of \d+ prompt tokens cached", foot(page))
    assert cached and int(cached[1]) > 0  # the earlier turns were found
    assert page.evaluate("turns.length") == 6
    page.evaluate("$('clear').click()")
    assert page.evaluate("turns.length") == 0
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0
    require_no_leak(server)


def test_log_follows_the_end_if_it_is_in_view(page: Browser) -> None:
    page.look(1180, 420)
    for question in ("Who are you?", "Tell me a story about a fox named Lily.", "Who are you?"):
        ask(page, question)
        assert page.evaluate("$('log').scrollHeight - $('log').scrollTop - $('log').clientHeight") < 2
    page.type("Tell me a story about a fox named Lily.")
    page.press("Enter")
    page.evaluate("$('log').scrollTop = 0")
    page.wait("!running")
    assert page.evaluate("$('log').scrollTop") == 0


def test_model_text_is_never_markup(page: Browser) -> None:
    evil = "<img src=x onerror=alert(1)><b>grün</b>"
    answer = ask(page, f"Repeat exactly: {evil}")
    assert "<" in answer
    assert page.evaluate("document.querySelectorAll('#log img, #log b, #log script').length") == 0
    assert evil in page.evaluate("document.querySelector('.user .text').textContent")


def test_policy_blocks_foreign_script(page: Browser) -> None:
    blocked: Any = page.evaluate(
        "new Promise((done) => { addEventListener('securitypolicyviolation', (e) => done(e.effectiveDirective));"
        " const s = document.createElement('style'); s.append('*{color:red}'); document.head.append(s); })"
    )
    assert blocked.startswith("style-src")
    with pytest.raises(AssertionError, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<p>'")
    page.call("Runtime.evaluate", expression="0")  # collects what was logged
    page.problems.clear()


@pytest.mark.parametrize(
    "stop", ["document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))", "$('send').click()"]
)
def test_stop_aborts_the_request(page: Browser, server: ServerProcess, stop: str) -> None:
    page.evaluate("$('temperature').value = '1'")
    page.evaluate(
        "const body = requestBody; requestBody = () => JSON.stringify({...JSON.parse(body()), ignore_eos: true, n: 16})"
    )
    before, whole = server.metrics()["generation_tokens_total"], 16 * (server.info()["max_model_len"] - 200)
    # In the page, as the longest answer may be whole before we have seen its beginning from outside.
    page.evaluate(
        "const plain = write; write = (turn, box) => { plain(turn, box);"
        f" if (running && turn.content.length > 20) {{ window.label ??= $('send').textContent; {stop} }} }}"
    )
    page.type("Tell me a very long story.")
    page.press("Enter")
    page.wait(f"{LAST}?.querySelector('.foot').textContent")
    assert page.evaluate("label") == "Stop"
    page.wait("!running")
    assert foot(page).endswith("stoppedCopyAgain")
    assert "tokens" in foot(page)
    assert eventually(lambda: server.metrics()["generation_tokens_total"] > before)
    require_no_leak(server)
    assert server.metrics()["generation_tokens_total"] - before < whole
    assert page.evaluate("turns.length") == 2  # the partial answer stays in the conversation


def test_settings_reach_the_request(page: Browser) -> None:
    page.evaluate(
        "$('max_tokens').value = '4'; $('seed').value = '7'; $('top_k').value = '-1'; $('top_p').value = '0.9'"
    )
    page.evaluate("$('system').value = 'Be brief.'; turns.push({role: 'user', content: 'x'})")
    assert page.evaluate("JSON.parse(requestBody())") == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_timing": True,
        "temperature": 0,
        "top_p": 0.9,
        "top_k": -1,
        "seed": 7,
        "max_tokens": 4,
    }
    page.evaluate("turns.pop()")
    ask(page, "Tell me a story.")
    assert foot(page).startswith("4 tokens")
    assert "cut at the token limit" in foot(page)


def test_keyboard(page: Browser) -> None:
    page.type("one")
    page.press("Enter", SHIFT)
    page.type("two")
    assert page.evaluate("$('prompt').value") == "one\ntwo"
    page.press("Enter")
    page.wait("!running && document.querySelectorAll('.turn').length === 2")
    assert page.evaluate("turns[0].content") == "one\ntwo"
    page.evaluate("$('tab-chat').focus()")
    page.press("ArrowRight")
    assert page.evaluate("document.activeElement.id + $('tab-engine').ariaSelected") == "tab-enginetrue"
    page.press("ArrowRight")
    page.press("ArrowRight")  # around the end
    assert page.evaluate("document.activeElement.id") == "tab-chat"


def test_refusal_is_shown_and_the_question_restored(page: Browser) -> None:
    page.evaluate("$('prompt').value = 'word '.repeat(200000)")
    page.evaluate("$('composer').requestSubmit()")
    page.wait("!running && document.querySelector('.foot .error')")
    assert page.evaluate("turns.length") == 0
    assert page.evaluate("$('prompt').value.length") > 100_000
    page.problems.clear()  # the browser logs a 400 as an error
    page.evaluate("$('prompt').value = ''")
    assert "42" in ask(page, "What is 12 + 30?")
    page.problems.clear()


def test_engine_is_polled_only_while_visible(page: Browser, server: ServerProcess) -> None:
    polls = "performance.getEntriesByName(location.origin + '/engine_view').length"
    ask(page, "What is 12 + 30?")
    assert page.evaluate(polls) == 0
    page.evaluate("$('tab-engine').click()")
    page.wait(f"{polls} >= 3 && $('running').textContent === '0' && $('n-cached').textContent !== '0'")
    pages = page.evaluate(f"{PAGES}.map((n) => Number($(n).textContent.replace(',', '')))")
    assert sum(pages) == 1024
    assert pages[2] > 0  # the conversation's prefix
    assert page.evaluate("$('spark').getAttribute('points').split(' ').length") >= 3
    for hide, reveal in (
        ("$('tab-chat').click()", "$('tab-engine').click()"),
        (
            "Object.defineProperty(document, 'visibilityState', {configurable: true, get: () => 'hidden'});"
            "document.dispatchEvent(new Event('visibilitychange'))",
            "delete document.visibilityState; document.dispatchEvent(new Event('visibilitychange'))",
        ),
    ):
        before = page.evaluate(f"{hide}; {polls}")
        page.evaluate("new Promise((wake) => setTimeout(wake, 2500))")
        assert page.evaluate(polls) <= before + 1  # one may have been on its way
        page.evaluate(f"{reveal}; {reveal}")
        page.wait(f"{polls} >= {before + 2}")
    rate = (
        f"const began = performance.now(), polled = {polls}; new Promise((done) => setTimeout("
        f"() => done([{polls} - polled, (performance.now() - began) / 1000]), 3000))"
    )
    more, seconds = page.evaluate(rate)
    assert more <= seconds + 1  # still one loop
    page.evaluate("$('flush').click()")
    page.wait("$('n-cached').textContent === '0'")


def test_batch_and_tree_are_shown_live(page: Browser, server: ServerProcess) -> None:
    system = "You are the keeper of a small lighthouse on a rocky coast, and you answer letters from children.\n"
    letters = ["Who lives in the lighthouse <b>with</b> you?", "How tall is the lighthouse, and is it cold there?"]
    with server.client() as client, contextlib.ExitStack() as streams:
        client.post("/flush_cache", json={})
        page.evaluate("$('tab-engine').click()")
        page.wait("$('tree').textContent.startsWith('Empty')")
        assert "No request is running" in page.evaluate("$('batch').textContent")
        assert page.evaluate("$('state').textContent").startswith("Nothing runs.")
        # What is shown once both run stays, while we look at one thing after the other and they may end.
        page.evaluate(
            "const plain = showEngine; showEngine = (data) => {"
            " if (document.querySelectorAll('#batch .row, #tree i').length !== 4) plain(data); }"
        )
        lines: list[Iterator[str]] = []  # dropping an iterator closes its stream
        for letter in letters:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": letter}]
            body = {"messages": messages, "stream": True, "ignore_eos": True, "speculate": False}
            response = streams.enter_context(client.stream("POST", "/v1/chat/completions", json=body))
            lines.append(response.iter_lines())
            for _ in range(8):  # its prompt is computed and in the cache
                next(lines[-1])
        page.wait("document.querySelectorAll('#batch .row, #tree i').length === 4")
        used = page.evaluate("[...document.querySelectorAll('#tree .used b')].map((b) => b.textContent)")
        assert used[0] == "2" and used.count("1") >= 2
        first = page.evaluate("document.querySelector('#tree code').textContent")
        assert "lighthouse" in first and "↵" in first
        uids = page.evaluate("[...document.querySelectorAll('#batch b')].map((b) => b.textContent)")
        ends = page.evaluate("[...document.querySelectorAll('#tree i')].map((i) => i.textContent)")
        assert sorted(uids) == sorted(ends)
        cached = page.evaluate("document.querySelectorAll('#batch .hit')[1].style.width")
        assert float(cached.removesuffix("%")) > 0  # the second found the first one's system prompt
        pages = page.evaluate(f"{PAGES}.map((n) => Number($(n).textContent.replace(',', '')))")
        assert sum(pages) == 1024 and min(pages[1], pages[3]) > 0
        assert page.evaluate("document.querySelectorAll('#tree code b').length") == 0
        assert page.evaluate("$('state').textContent") == "2 requests are being served."
        assert page.evaluate("steps.length") > 8 and page.evaluate("Math.max(...steps.map((s) => s.rows))") == 2
        assert page.evaluate("steps.every((s) => s.ms > 0 && s.rows + s.prompt_tokens > 0)")
        assert page.evaluate("document.querySelectorAll('#strip svg:not([hidden])').length") == 3  # no drafts
        save(page, "engine")
        page.evaluate("showEngine = plain")
    page.wait("document.querySelectorAll('#batch .row, #tree .used').length === 0")
    page.wait("document.querySelectorAll('#tree .node').length >= 3")
    require_no_leak(server)


@pytest.mark.parametrize("width", [320, *(pytest.param(w, marks=pytest.mark.slow) for w in (390, 768, 1180))])
def test_page_fits_the_window(page: Browser, width: int) -> None:
    page.look(width, 700)
    ask(page, "Repeat exactly: " + "x" * 120)
    for tab in ("chat", "engine", "api"):
        page.evaluate(f"$('tab-{tab}').click()")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.documentElement.scrollHeight") <= 700


def test_key_is_asked_for_and_kept_in_memory_only(chromium: Browser) -> None:
    with ServerProcess("--num-pages", "256", "--api-key", "s3cret") as server:
        chromium.open(server.url)
        chromium.wait("$('model').textContent.includes('API key')")
        chromium.evaluate("$('key').focus()")
        chromium.type("s3cret")
        chromium.evaluate("$('key').blur()")
        chromium.wait("$('model').textContent === 'minisgl-demo'")
        chromium.evaluate("$('temperature').value = '0'")
        assert "42" in ask(chromium, "What is 12 + 30?")
        assert chromium.evaluate("sessionStorage.length + document.cookie.length") == 0
        assert "s3cret" not in chromium.evaluate("JSON.stringify(localStorage)")
        assert chromium.evaluate("location.href.includes('s3cret')") is False
    assert not [p for p in chromium.problems if "401" not in p]


def test_copy_button(page: Browser) -> None:
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    answer = ask(page, "Who are you?")
    said = page.evaluate(  # for a short while
        f"new Promise((done) => {{ const button = {LAST}.querySelector('.foot button');"
        " new MutationObserver(() => done(button.textContent)).observe(button, {childList: true}); button.click(); })"
    )
    assert said == "Copied"
    assert page.evaluate("navigator.clipboard.readText()") == answer


def test_nothing_is_generating_when_nothing_runs(page: Browser) -> None:
    figures = "{waiting: 0, cached_tokens: 240, looked_up_tokens: 1000, prompt_tokens: 1}"
    page.evaluate(f"samples = []; showFigures({{...{figures}, running: 1, generation_tokens: 0}})")
    page.evaluate(f"showFigures({{...{figures}, running: 1, generation_tokens: 500}})")
    assert int(page.evaluate("$('rate').textContent")) > 0
    page.evaluate(f"showFigures({{...{figures}, running: 0, generation_tokens: 500}})")
    assert page.evaluate("$('rate').textContent") == "0"
    assert page.evaluate("$('hits').textContent") == "24 %"


MARKDOWN = """# Title
Some **bold**, *soft* and `a<b>`, ~~gone~~, [a link](https://example.com/a) and [none](javascript:alert(1)).

| x | y |
|---|--:|
| 1 | <img src=x onerror=alert(1)> |

1. one
   - inner
2. two

```html
<script>alert(1)</script>
**not bold**
```
> quoted

2 * 3 * 4 and snake_case_name"""


def test_markdown_is_made_of_elements(page: Browser) -> None:
    page.evaluate("document.body.append(Object.assign(document.createElement('div'), {id: 'md'})); 0")
    for end in (*range(1, len(MARKDOWN), 7), len(MARKDOWN)):  # as it streams
        page.evaluate(f"fill($('md'), {MARKDOWN[:end]!r}); 0")
    tags = page.evaluate("[...$('md').querySelectorAll('*')].map((e) => e.tagName.toLowerCase()).join(' ')")
    assert tags == (
        "h1 p strong em code del a div table tr th th tr td td ol li ul li li pre code button blockquote p p"
    )
    assert page.evaluate("$('md').querySelector('a').href") == "https://example.com/a"
    assert page.evaluate("$('md').querySelector('pre code').textContent") == ("<script>alert(1)</script>\n**not bold**")
    text = page.evaluate("$('md').textContent")
    for literal in ("[none](javascript:alert(1))", "<img src=x onerror=alert(1)>", "2 * 3 * 4", "snake_case_name"):
        assert literal in text
    whole = page.evaluate(f"$('md').innerHTML === fill(document.createElement('div'), {MARKDOWN!r}).innerHTML")
    assert whole  # made in pieces or at once
    deep = ">" * 3000 + "\n" + "- " * 3000 + "\n" + "**" * 3000 + "`" * 3001 + "[" * 3000
    began = page.evaluate(f"const began = performance.now(); fill($('md'), {deep!r}); performance.now() - began")
    assert began < 2000


def test_edit_and_again(page: Browser) -> None:
    ask(page, "What is 12 + 30?")
    ask(page, "Who are you?")
    page.evaluate(f"{LAST}.querySelector('.foot button:last-child').click()")  # Again
    page.wait("!running && turns.length === 4")
    assert page.evaluate("turns.map((t) => t.role).join()") == "user,assistant,user,assistant"
    page.evaluate("document.querySelector('.user .foot button').click()")  # Edit the first
    assert page.evaluate("$('prompt').value") == "What is 12 + 30?"
    assert page.evaluate("turns.length + document.querySelectorAll('.turn').length") == 0
    page.evaluate("$('prompt').select()")
    assert "What is 20 + 30?" not in ask(page, "What is 20 + 30?")
    assert page.evaluate("turns[0].content") == "What is 20 + 30?"


def test_conversations_are_kept_in_the_browser(page: Browser, server: ServerProcess) -> None:
    ask(page, "What is 12 + 30?")
    address = page.evaluate("location.href")
    page.evaluate("$('fresh').click()")
    assert page.evaluate("turns.length") == 0 and page.evaluate("location.hash") == ""
    ask(page, "Who are you?")
    page.open(server.url + "/?again")
    page.wait("$('kept').children.length === 2")
    assert page.evaluate("turns.length") == 0  # a new one
    page.open(address)
    page.wait("turns.length === 2")
    assert "42" in page.evaluate("$('log').textContent") and "tokens/s" in page.evaluate("$('log').textContent")
    titles = page.evaluate("[...$('kept').children].map((li) => li.firstChild.textContent)")
    assert titles == ["Who are you?", "What is 12 + 30?"]
    page.evaluate("$('kept').firstChild.lastChild.click()")  # delete the other
    assert page.evaluate("$('kept').children.length + turns.length") == 3
    page.evaluate("$('clear').click()")
    assert page.evaluate("Object.keys(localStorage).length") == 0
    page.evaluate("localStorage['minisgl.tools.chat.odd'] = '{'; listChats()")  # of another version, or damaged
    assert page.evaluate("$('kept').textContent") == "empty×"


def test_a_model_can_be_picked_if_there_are_several(chromium: Browser) -> None:
    pick = "$('models').value = 'two'; $('models').dispatchEvent(new Event('change'))"
    names = "[...$('models').children].map((e) => e.textContent).join()"
    with ServerProcess("--num-pages", "256", "--served-model-name", "one", "two") as server:
        chromium.open(server.url)
        chromium.wait("!$('models').hidden")
        chromium.evaluate(pick)
        assert chromium.evaluate("document.title") == "minisgl · two"
        ask(chromium, "What is 12 + 30?")
        assert "42" in chromium.evaluate("$('log').textContent")
        chromium.open(server.url + "/?again")  # the choice is kept
        chromium.wait("!$('models').hidden")
        assert chromium.evaluate("JSON.parse(requestBody()).model") == "two"
        several = "[{id: 'two'}, {id: 'one'}, {id: 'two'}]"  # from a router
        chromium.evaluate(f"call = async () => ({{json: async () => ({{data: {several}}})}}); connect()")
        chromium.wait(f"{names} === 'two,one'")
        chromium.evaluate("localStorage.clear()")


def test_api_is_shown_at_docs_also_behind_a_proxy_path(chromium: Browser) -> None:
    chromium.problems.clear()
    with ServerProcess("--num-pages", "256", "--root-path", "/llm") as server:
        chromium.open(server.url + "/llm/docs")
        chromium.wait("document.querySelectorAll('#api > details').length > 40")
        shown = chromium.evaluate("$('api').textContent")
        for part in (
            "Answer a chat",
            f"curl {server.url}/llm/v1/chat/completions -H",
            "0 (greedy) to 100",
            "messages *",
        ):
            assert part in shown
        chromium.evaluate("$('tab-chat').click()")
        ask(chromium, "What is 12 + 30?")
        assert "42" in chromium.evaluate("$('log').textContent")
        chromium.open(server.url + "/llm/")
        chromium.wait("$('model').textContent === 'minisgl-demo'")
        chromium.evaluate("$('tab-engine').click()")
        chromium.wait("$('n-free').textContent !== '–'")
        assert chromium.problems == []
        chromium.call("Page.navigate", url="about:blank")


def test_the_bar_of_pages_zooms_to_what_is_used(page: Browser) -> None:
    view = "{pages_private: 2, pages_locked: 3, pages_cached: 5, pages_free: 990, pages_total: 1000, page_size: 16}"
    page.evaluate(f"showPages({view})")
    assert page.evaluate("[...$('bar').children].map((e) => e.style.width).join()") == "12.8%,19.2%,32%"
    assert page.evaluate("$('pool').lastChild.style.width") == "1.5625%"
    assert "1/64" in page.evaluate("$('zoomed').textContent")
    page.evaluate(f"showPages({{...{view}, pages_free: 0, pages_cached: 995}})")
    assert page.evaluate("$('pool').hasAttribute('hidden')") and page.evaluate("$('zoomed').textContent") == ""


def test_tiers_and_drafts_are_shown(chromium: Browser, tmp_path: Path) -> None:
    chromium.problems.clear()
    flags = (f"--disk-kv={tmp_path}:20M", "--num-pages", "64", "--page-size", "16", "--speculate", "ngram")
    with ServerProcess(*flags) as server, server.client() as client:
        chromium.look(1280, 1400)
        chromium.open(server.url)
        chromium.evaluate("$('tab-engine').click()")
        chromium.wait("!$('tier-card').hidden && $('tree').textContent.startsWith('Empty')")
        assert chromium.evaluate("$('replica-card').hidden && $('drafts').hidden")
        for name in ("Anna", "Ben", "Cleo", "Dan", "Eva", "Anna"):  # more than 64 pages, and the first once more
            body = {"prompt": f"{name} ran over the hill and saw a bird. " * 25, "max_tokens": 16, "temperature": 0}
            client.post("/v1/completions", json=body).raise_for_status()
        facts = "document.querySelector('#tiers .row').lastChild.textContent"
        chromium.wait(f"/, [1-9][0-9]* stored, [1-9][0-9]* loaded$/.test({facts})")

        def is_shown() -> bool:  # idle time goes on storing
            view = client.get("/engine_view").json()["view"]
            (tier,) = view["tiers"]
            width = chromium.evaluate("document.querySelector('#tiers .disk').style.width")
            share = 100 * tier["pages_held"] / tier["pages_total"]
            below = sum(node["place"] == "disk" for node in view["nodes"])
            return (
                chromium.evaluate(facts).startswith(f"{tier['pages_held']} of ")
                and float(width.removesuffix("%")) == pytest.approx(share, rel=1e-3)
                and 0 < below < len(view["nodes"])
                and chromium.evaluate("document.querySelectorAll('#tree .in-disk').length") == below
            )

        assert eventually(is_shown)
        assert chromium.evaluate("document.querySelector('#tree .in-disk small').textContent") == "disk"
        chromium.wait("document.querySelectorAll('#strip svg:not([hidden])').length === 4 && !$('drafts').hidden")
        assert chromium.evaluate("steps.some((s) => s.accepted > 0)")
        save(chromium, "tiers")
        one = "{name: 'host', pages_total: 8, pages_held: 2, stored: 9, loaded: 3, lost: 1}"
        chromium.evaluate(f"watching = null; showTiers([{one}])")
        assert chromium.evaluate("$('tiers').textContent") == "host25 %2 of 8 pages, 9 stored, 3 loaded, 1 damaged"
        bar = "document.querySelector('#tiers .host')"
        chromium.evaluate(f"{bar}.getBoundingClientRect(); showTiers([{{...{one}, pages_held: 6}}])")
        assert chromium.evaluate(f"{bar}.getAnimations().length") == 1  # it moves there
        assert chromium.problems == []


@pytest.mark.slow
def test_each_replica_has_a_line_and_can_be_picked(chromium: Browser) -> None:
    line = "[...$('replicas').children].map((row) => row.textContent)"
    pressed = "[...document.querySelectorAll('#replicas button')].map((b) => b.ariaPressed).join()"
    with ServerProcess("--dp", "2", "--num-pages", "2048", "--drain-timeout", "600") as server:
        chromium.look(1280, 1400)
        chromium.open(server.url)
        chromium.evaluate("const plain = setTimeout; window.setTimeout = (f, ms) => plain(f, ms / 10)")
        chromium.evaluate("$('tab-engine').click()")
        chromium.wait(f"!$('replica-card').hidden && {pressed} === 'true,false' && $('tier-card').hidden")
        assert all(text[1:].startswith("serving") for text in chromium.evaluate(line))
        with server.client() as client, contextlib.ExitStack() as streams:
            body = {"prompt": "Once upon a time", "n": 16, "ignore_eos": True, "stream": True}
            response = streams.enter_context(client.stream("POST", "/v1/completions", json=body))
            lines = response.iter_lines()
            next(lines)
            chromium.wait(f"{line}.every((text) => text.includes('8 running, 0 waiting'))")
            assert chromium.evaluate("$('state').textContent") == "16 requests are being served."
            chromium.wait("document.querySelectorAll('#batch .row').length === 8")
            chromium.evaluate("window.first = $('batch').textContent.match(/#\\d+/g)")
            chromium.evaluate("$('replicas').children[1].querySelector('button').click()")
            others = "$('batch').textContent.match(/#\\d+/g).filter((uid) => !first.includes(uid))"
            chromium.wait(f"{pressed} === 'false,true' && {others}.length === 8")
            save(chromium, "replicas")
            server.process.send_signal(signal.SIGUSR2)  # renews each
            chromium.wait(f"{line}[0].includes('draining')")
        chromium.wait(f"{line}.some((text) => text.includes('starting'))")
        assert chromium.evaluate("$('replicas').children.length") == 2
        chromium.wait(f"{line}.every((text) => text.includes('serving'))")
        assert eventually(lambda: "replica 1 is ready" in server.log)
        with stopped(server.info()["processes"]["minisgl-DP0-TP0-scheduler"]):
            chromium.wait(f"{line}[0].includes('silent') && {pressed} === 'false,true'")
        chromium.wait(f"{line}[0].includes('serving')")
    chromium.problems.clear()  # the browser logs each refused view
