"""Matchers over the built-in tokenizer: allowed tokens, complete texts, refused grammars."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from minisgl.api.parsers.channels import ChannelParser
from minisgl.api.parsers.forms import TOOL_FORMS, ToolForm
from minisgl.api.parsers.pieces import ParsedCall
from minisgl.api.parsers.reasoning import REASONING_FORMS
from minisgl.api.parsers.tools import ToolParser
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import RequestError
from minisgl.core.params import NUMBER, Grammar, GrammarKind, Limits, SamplingParams, Thinking, validate_sampling
from minisgl.grammar.compiler import GrammarCompiler, TokenMatcher
from minisgl.grammar.thinking import ThinkingMatcher
from minisgl.tokenizer.detokenize import DetokenizeManager
from minisgl.tokenizer.folder import load_tokenizer
from minisgl.tokenizer.text import TokenBytes
from minisgl.tokenizer.thinking import ThinkingCounter

VOCAB, EOS = 4200, 2  # more tokens than the tokenizer has: models pad their vocabulary
TOKENIZER = load_tokenizer(BUILTIN_MODEL)
COMPILER = GrammarCompiler(BUILTIN_MODEL, VOCAB, frozenset({EOS}))
SPECIAL = [0, 1, 2]


def compiled(kind: GrammarKind, text: str, *, ignore_eos: bool = False, after: str = "") -> TokenMatcher:
    return COMPILER.compile(Grammar(kind, text, after=after), ignore_eos)


def advance(matcher: TokenMatcher, token: int) -> None:
    matcher.advance(token)
    COMPILER.compute_masks([matcher])
    if matcher.error is not None:
        raise matcher.error


def allowed(matcher: TokenMatcher | ThinkingMatcher) -> list[int]:
    bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
    assert len(matcher.mask) == -(-VOCAB // 32)
    return np.flatnonzero(bits).tolist()


def accepts(matcher: TokenMatcher, text: str, tokenizer: Tokenizer = TOKENIZER) -> bool:
    """Whether `text` is whole; each of its tokens must be allowed in its turn."""
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        if token not in allowed(matcher):
            return False
        advance(matcher, token)
    return EOS in allowed(matcher) or matcher.is_complete


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", SCHEMA, '{"name": "Anna <|im_end> grün 🙂", "age": -12}', '{"name": "Anna", "age": "12"}'),
        ("json_schema", SCHEMA, '{"name": "", "age": 0}', '{"name": "Anna"}'),
        ("json_schema", SCHEMA, '{"name": "x", "age": 7}', '{"name":  "x", "age": 7}'),
        ("json_schema", "{}", "[null, 1.5]", "[nul]"),
        ("regex", "[0-9]{3}-[a-f]+", "123-cafe", "123-cafx"),
        ("choice", '["red", "gr\\u00fcn", "a\\"b\\\\n"]', "grün", "green"),
        ("choice", '["red", "a\\"b\\\\n"]', 'a"b\\n', "a"),
        ("ebnf", 'root ::= "a" root | "b" [x-z]{2}', "aabxz", "aab"),
        ("ebnf", 'start: "<" NAME ">"\nNAME: /[a-z]+/', "<ab>", "<AB>"),
    ],
)
def test_matchers_allow_valid_text_only(kind: GrammarKind, text: str, good: str, bad: str) -> None:
    assert accepts(compiled(kind, text), good)
    assert not accepts(compiled(kind, text), bad)


# GBNF as llama.cpp and XGrammar document it, Lark as vLLM's users write it: (grammar, texts of it, texts that are not).
EBNF: list[tuple[str, list[str], list[str]]] = [
    # GBNF: lines, comments, names
    ('root ::= "a"\n  | "b"', ["a", "b"], ["ab", ""]),
    ('# first\n\nroot ::= ( # open\n  "a"\n\n  | "b" # b\n) "!"\n# last', ["a!", "b!"], ["a", "!"]),
    ('root ::= "a" |\n "b"\r\n\t| "c"\r\n', ["b", "c"], ["d"]),
    ('x-1 ::= "1"\nroot ::= x-1 x_1 X1\nx_1 ::= "2"\nX1 ::= "3"', ["123"], ["113", "12"]),
    ('root ::= start rule-2\nstart ::= "s"\nrule-2 ::= "2"', ["s2"], ["s"]),
    ('\ufeffroot::="::=" "# no comment"', ["::=# no comment"], ["::="]),
    # characters, escapes, classes
    (r'root ::= "\x41\u00e9\U0001F600\"\\\[\]\n\r\t"', ['Aé😀"\\[]\n\r\t'], ["A"]),
    (r'root ::= "" | [\x41-\x43\u3041-\u309F\U0001F600-\U0001F64F]+', ["", "ACぁん😀"], ["D", "a", "🙈a"]),
    (r"root ::= [^\n\]-]+", ["é/[^🙂", "a\r"], ["a\n", "]", "-", ""]),
    (r"root ::= [-+*/] [a-] [\-\]^]", ["/a]", "+-^", "---"], ["/b]", "+a["]),
    (r'root ::= [^"\\\x7F\x00-\x1F]* "\""', ['é"', '"'], ['\x00"', '\x7f"', '"a"']),
    ("root ::= . .", ["\n🙂", "ab"], ["a", "abc"]),
    # repetition, empty alternatives
    ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"{,1} [e]? ("fg")* [h]+', ["aabh", "aabbccdefgfghh"], ["abh", "aabcccch"]),
    ('root ::= (("a"){ 1 , 2 }){2}', ["aa", "aaaa"], ["a", "aaaaa"]),
    ('root ::= "x" ws "y" ( | "z")\nws ::= | " " | "\\n" [ \\t]{0,2}', ["xy", "x yz", "x\n \ty"], ["x  y"]),
    # what is not recursive is not split, and what is recursive nests
    ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ab", "bc"]),
    ('root ::= word "b" | "(" root ")"\nword ::= [a-z]*', ["aab", "(b)", "((abab))"], ["(aab", "ba", "a"]),
    ('root ::= "(" root ")" | [^()]* ";"', [";", "(;)", "a;b;", "((x\n;))"], ["(", "a", "(a;"]),
    ('root ::= item ("," item)*\nitem ::= [0-9]+ | "[" (root | ) "]"', ["1", "[]", "[1,[2,[]],30]"], ["[1,]", "[1"]),
    ('root ::= e\ne ::= e "+" t | t\nt ::= "x" | "(" e ")"', ["x+x", "(x+(x))+x"], ["x+", "(x", "xx"]),
    # vLLM's example of SQL, in both
    (
        'root ::= select_statement\nselect_statement ::= "SELECT " column " from " table " where " condition\n'
        'column ::= "col_1 " | "col_2 "\ntable ::= "table_1 " | "table_2 "\ncondition ::= column "= " number\n'
        'number ::= "1 " | "2 "',
        ["SELECT col_1  from table_2  where col_2 = 1 "],
        ["SELECT col_3  from table_2  where col_2 = 1 "],
    ),
    (
        '?start: select_statement\nselect_statement: "SELECT " column_list " FROM " table_name\n'
        'column_list: column_name ("," column_name)*\ntable_name: identifier\ncolumn_name: identifier\n'
        "identifier: /[a-zA-Z_][a-zA-Z0-9_]*/",
        ["SELECT a,b_1 FROM t"],
        ["SELECT a,b_1 FROM 1", "SELECT a, b FROM t"],
    ),
    # Lark: forms of rules, aliases, imports, flags, priorities, comments
    ('?start: "yes" | "no"', ["yes", "no"], ["maybe", "yesno"]),
    (
        '?start: sum\n?sum: product\n    // sums\n    | sum "+" product   -> add\n    # and differences\n\n   \n'
        '    | sum "-" product -> sub\n?product: atom | product "*" atom -> mul\n'
        '?atom: NUMBER -> number | "-" atom -> neg | "(" sum ")"\n%import common.NUMBER\n'
        "%import common.WS_INLINE\n%ignore WS_INLINE\n",
        ["1+2*(3.5 - -4)", "7"],
        ["1+", "(1", "1 2"],
    ),
    ('!start: "a"i _X+ [b] C~2\n_X.2: /x/i | "y".."z"\nb.-1: "b"\nC: "c"', ["AXyzbcc", "axcc"], ["abcc", "axbc"]),
    ("start: /a.b/s | /c d/x | /(?i)e\\/f/", ["a\nb", "cd", "E/F"], ["c d", "ab"]),
    ('%import common (INT, CNAME)\n%import common.ESCAPED_STRING -> S\nstart: INT | CNAME | S', ["1", '"x"'], ["-1"]),
    ('start: "say: root ::= x" | "\\u00e9\\x41\\n"', ["say: root ::= x", "éA\n"], ["x"]),
    ('start: "n=" %json {"type": "integer"}\n', ["n=-12"], ["n=1.5"]),
    ("start: W\nW: /[a-z]+/ & ~/(?s:.*)no(?s:.*)/", ["yes"], ["yesno"]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "good", "bad"), EBNF)
def test_grammars_as_others_write_them_allow_exactly_their_texts(grammar: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good + bad if accepts(compiled("ebnf", grammar), text)] == good


@pytest.mark.parametrize("seed", range(8))
def test_grammars_without_recursion_match_as_a_regular_expression(seed: int) -> None:
    """Random GBNF over three letters, and the same as a regular expression of Python: all texts up to four letters."""
    rng = random.Random(seed)
    rules: list[str] = []
    patterns: list[str] = []

    def choice(depth: int) -> tuple[str, str]:
        parts = [sequence(depth) for _ in range(rng.randint(1, 3))]
        return " | ".join(gbnf for gbnf, _ in parts), "(?:" + "|".join(pattern for _, pattern in parts) + ")"

    def sequence(depth: int) -> tuple[str, str]:
        gbnf, pattern = map("".join, zip(*(item(depth) for _ in range(rng.randint(1, 3))), strict=True))
        return gbnf, pattern

    def item(depth: int) -> tuple[str, str]:
        letters = "".join(rng.choices("abc", k=rng.randint(0, 2)))
        leaves = [(f'"{letters}"', f"(?:{letters})"), ("[ab]", "[ab]"), ("[^ab]", "[^ab]"), (".", "(?s:.)")]
        leaves += [(f"rule-{i}", pattern) for i, pattern in enumerate(patterns)]
        gbnf, pattern = rng.choice(leaves)
        if depth and rng.random() < 0.4:
            gbnf, pattern = choice(depth - 1)
            gbnf = f"({gbnf})"
        count = rng.choice(["", "", "", "*", "+", "?", "{2}", "{1,2}"])
        return f" {gbnf}{count}", pattern + count

    for i in range(4):
        gbnf, pattern = choice(1)
        rules.append(f"rule-{i} ::= {gbnf}")
        patterns.append(pattern)
    grammar = "\n".join(["root ::= rule-3 [.]", *rules])
    texts = ["".join(letters) + "." for n in range(5) for letters in itertools.product("abc", repeat=n)]
    start = compiled("ebnf", grammar)
    for text in texts:
        matcher = TokenMatcher(Grammar("ebnf", grammar), start.matcher.deep_copy(), VOCAB, [EOS], may_end=True)
        assert accepts(matcher, text) == (re.fullmatch(patterns[3] + "[.]", text) is not None), (grammar, text)


def test_special_and_unknown_tokens_are_never_allowed() -> None:
    matcher = compiled("json_schema", '{"type": "string"}')
    advance(matcher, TOKENIZER.encode('"').ids[0])
    assert not set(allowed(matcher)) & {*SPECIAL, *range(4096, VOCAB)}
    assert len(allowed(matcher)) > 3000


def test_eos_is_allowed_only_where_the_text_may_end() -> None:
    matcher = compiled("regex", "a+b?")
    assert EOS not in allowed(matcher)
    advance(matcher, TOKENIZER.encode("a").ids[0])
    assert EOS in allowed(matcher) and not matcher.is_complete
    advance(matcher, TOKENIZER.encode("b").ids[0])
    assert allowed(matcher) == [EOS] and matcher.is_complete
    never = compiled("regex", "a+b?", ignore_eos=True)
    advance(never, TOKENIZER.encode("a").ids[0])
    assert EOS not in allowed(never)


def test_a_grammar_may_begin_behind_the_reasoning() -> None:
    for kind, text, good in (("json_schema", SCHEMA, '{"name": "x", "age": 7}'), ("regex", "[0-9]+", "12")):
        free = "Let me see: <think> it </thinks> or so.\n</think>"
        assert accepts(compiled(kind, text, after="</think>"), free + good)  # type: ignore[arg-type]
        assert not accepts(compiled(kind, text, after="</think>"), free + "x")  # type: ignore[arg-type]
        assert not accepts(compiled(kind, text, after="</think>"), good)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("regex", "[a", "unclosed"),
        ("regex", "", "empty text"),
        ("ebnf", "root ::= ((((", "parenthesis is not closed"),
        ("ebnf", 'root ::= "a")', "outside a rule"),
        ("ebnf", 'root ::= "a"\nroot ::= "b"', "root is defined twice"),
        ("ebnf", 'root ::= "a" item', "item is not defined"),
        ("ebnf", 'item ::= "a"', "root is not defined"),
        ("ebnf", "root ::= +", "nothing to repeat"),
        ("ebnf", 'root ::= "a"{1,2,3}', "xpect"),
        ("ebnf", 'root ::= "\\q"', "line 1 is not GBNF"),
        ("ebnf", 'root ::= "a"\n (= "b")', "line 2 is not GBNF.*= "),
        ("ebnf", "root ::= <think>", "not GBNF that can be read: '<think>'"),
        ("ebnf", "start: unknown", "unknown"),
        ("ebnf", 'start: list{"a"}\nlist{x}: x+', "params not supported"),
        ("ebnf", "%import python.NAME\nstart: NAME", "python.NAME"),
        ("ebnf", "%declare X\nstart: X", "declare"),
        ("json_schema", "{", "truncated"),
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "not present"),
        ("json_schema", '{"enum": []}', "nsatisfiable"),
        ("json_schema", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000, "recursion"),
    ],
)
def test_invalid_grammars_are_refused_with_the_reason(kind: GrammarKind, text: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as e:
        compiled(kind, text)
    assert e.value.status == 400 and e.value.param == "grammar" and len(e.value.message) < 500


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ebnf", "\n" * 16_000),
        ("ebnf", "root ::= " + "(" * 10_000),
        ("ebnf", "root ::= " + '"a" ' * 4000),
        ("ebnf", "root::=" + " " * 16_000 + "x"),
        ("ebnf", "#" * 16_000),
        ("ebnf", 'root ::= "a"{' + " " * 16_000),
        ("ebnf", "root ::= a\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(900))),
        ("json_schema", json.dumps({"pattern": "(?=a{" + "1" * 120_000})),
        ("json_schema", json.dumps({"pattern": "(?=" * 30_000 + "a"})),
        ("json_schema", json.dumps({"pattern": "^(?!" + "(a|b|c)?" * 40 + "d)x"})),
        ("ebnf", ("a ::= b\n") * 2000),
        ("ebnf", "root ::= " + "[" * 16_000),
        ("ebnf", "start: " + "(" * 8000 + '"a"' + ")" * 8000),
        ("regex", "((a{1,1000}){1,1000}){1,1000}"),
        ("regex", "(a|b|ab)*" * 1800),
        ("json_schema", json.dumps({"pattern": "(a|b|ab)*" * 10_000})),
        ("regex", "(x+x+)+y"),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(8000)]})),
        (
            "json_schema",
            json.dumps({"type": "object", "properties": {f"p{i}": {"pattern": "^(a|b){1,50}$"} for i in range(2000)}}),
        ),
    ],
)
def test_expensive_grammars_compile_within_bounds(kind: GrammarKind, text: str) -> None:
    """As long as is allowed, and as bad as we could think of."""
    validate_sampling(SamplingParams(grammar=Grammar(kind, text)), Limits(max_model_len=9, vocab_size=9))
    started = time.process_time()
    with contextlib.suppress(RequestError):
        compiled(kind, text)
    assert time.process_time() - started < 6  # the longest takes 1.5 s


FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}},
     "required": ["city"], "additionalProperties": False, "$defs": {"City": {"type": "string"}}}},
    {"name": "odd.name"},
]  # fmt: skip


def written(form: ToolForm, *calls: tuple[str, str]) -> str:
    """Calls as the grammar of the form wants them."""
    texts = []
    for i, (name, given) in enumerate(calls):
        items = [_item(form, key, value) for key, value in json.loads(given).items()]
        text = (form.native or form.call).replace("$name", name).replace(NUMBER, str(i))
        texts.append(text.replace("$arguments", form.comma.join(items) if form.native else given))
    value = form.begin + (form.between or "").join(texts) + form.end
    return value if form.is_bare else form.open[0] + value + "".join(form.close[-1:])


def _item(form: ToolForm, key: str, value: Any) -> str:
    is_text = isinstance(value, str) and form.text_item
    shown = value if is_text else json.dumps(value)
    return (form.text_item if is_text else form.item).replace("$key", key).replace("$value", shown)


def parsed(form: ToolForm, text: str, tools: dict[str, Any]) -> list[Any]:
    """The calls in `text`, with compact arguments, and other pieces as they are."""
    harmony = form is TOOL_FORMS["harmony"]
    parser = ChannelParser(tools) if harmony else ToolParser(form, tools)
    pieces = parser.feed(text) + parser.flush()
    return [(p.name, json.loads(p.arguments)) if isinstance(p, ParsedCall) else p for p in pieces]


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """A compiler whose tokenizer has the markers of all forms as special tokens."""
    tokenizer = load_tokenizer(BUILTIN_MODEL)
    markers = sorted(
        {"</think>", "<other>"}.union(*(form.markers for form in (*TOOL_FORMS.values(), *REASONING_FORMS.values())))
    )
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    tokenizer.save(str((folder := tmp_path_factory.mktemp("special")) / "tokenizer.json"))
    compiler = GrammarCompiler(folder, VOCAB, frozenset({EOS}))
    compiler.load()
    return compiler


PARIS = ("get_weather", '{"city": "Paris"}')
ODD = ("odd.name", '{"a": [1]}')


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", TOOL_FORMS)
def test_calls_follow_their_form(name: str, is_special: bool, special: GrammarCompiler) -> None:
    """Forced ones, with markers that are special tokens or not, after reasoning or not; the parser reads them all."""
    form, compiler = TOOL_FORMS[name], special if is_special else COMPILER
    tokenizer = load_tokenizer(compiler._folder)

    def takes(grammar: Grammar, text: str) -> bool:
        return accepts(compiler.compile(grammar, False), text, tokenizer)

    one, two = written(form, PARIS), written(form, PARIS, ODD)
    for is_single in (False, True):
        forced = Grammar("calls", form.calls(FUNCTIONS, is_single))
        assert takes(forced, one)
        assert takes(forced, two) != (is_single or form.between is None)
        wrong = "Hello", one[:-2], one.replace("city", "town"), one.replace("get_w", "get_h")
        assert not any(takes(forced, text) for text in wrong)
        after = msgspec.structs.replace(forced, after="</think>")
        assert takes(after, "I could {<tool</think>" + one)
        assert not takes(after, one)
    for text, calls in ((one, [PARIS]), (two, [PARIS, ODD]))[: 1 if form.between is None else 2]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        params = SamplingParams(shown_tokens=tuple(form.markers | REASONING_FORMS["harmony"].markers))
        shown = DetokenizeManager(tokenizer).decode(ids, params, [])
        expected = [(name, json.loads(arguments)) for name, arguments in calls]
        assert parsed(form, shown, {"get_weather": {}, "odd.name": {}}) == expected


_DEFS = {"Color": {"enum": ["red", "dark red"], "type": "string"}}
_TYPED = {
    "type": "object",
    "properties": {
        "unit": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
        "text": {"type": "string", "description": "d"},
        "n": {"type": "integer"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/Color"}},
    },
    "required": ["text"],
    "$defs": _DEFS,
}  # fmt: skip


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMS.items() if form.native])
def test_written_arguments_follow_their_schema(name: str, is_special: bool, special: GrammarCompiler) -> None:
    form, compiler = TOOL_FORMS[name], special if is_special else COMPILER
    tokenizer = load_tokenizer(compiler._folder)

    def takes(given: Any, schema: Any = _TYPED) -> bool:
        text = written(form, ("f", json.dumps(given)))
        grammar = Grammar("calls", form.calls([{"name": "f", "parameters": schema}], True))
        is_taken = accepts(compiler.compile(grammar, False), text, tokenizer)
        if is_taken and is_special:
            assert parsed(form, text, {"f": schema}) == [("f", given)]
        return is_taken

    first = {} if form.comma else {"unit": "dark red"}
    good = [{"text": "a\n <b> \\"}, first | {"text": "5", "n": -7}, {"text": "", "list": ["red"]}]
    assert [takes(given) for given in good] == [True] * 3
    bad = [{}, {"unit": "blue", "text": "a"}, {"text": "a", "n": "b"}, {"text": "a", "list": ["blue"]}, {"other": "a"}]
    assert not any(takes(given) for given in bad)
    optional = {"type": "object", "properties": {key: {"type": "integer"} for key in "abc"}}
    assert [takes(g, optional) for g in ({}, {"a": 1}, {"b": 2}, {"a": 1, "c": 3}, {"c": 3, "a": 1})] == [True] * 4 + [
        False
    ]
    assert takes({}, {"type": "object", "additionalProperties": False})
    assert takes({"x-y": "a b", "z": [1, {"a": None}]}, {"type": "object"})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x+$"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": ["string", "array"]}}, "required": ["a"]},
        {"type": "object", "properties": {"a b": {"enum": ["xx"]}}, "required": ["a b"]},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"enum": ["xx"]}}, "required": ["a"]},
        {"anyOf": [{"type": "object", "properties": {"a": {"const": "xx"}}, "required": ["a"]}]},
        {"type": "object", "properties": {"a": True}, "required": ["a"]},
        {"type": "object", "required": ["a"]},
        {"type": "object", "additionalProperties": {"const": "xx"}, "propertyNames": {"const": "a"}},
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "gemma4"])
def test_other_schemas_are_enforced_as_json(name: str, schema: dict[str, Any]) -> None:
    form = TOOL_FORMS[name]
    grammar = Grammar("calls", form.calls([{"name": "f", "parameters": schema}], True))
    key = "a b" if "a b" in str(schema) else "a"
    as_json = dataclasses.replace(form, native="")
    text = written(as_json, ("f", json.dumps({key: "xx"})))
    assert accepts(COMPILER.compile(grammar, False), text)
    assert not accepts(COMPILER.compile(grammar, False), text.replace(f'"{key}"', '"c"'))
    assert parsed(form, text, {"f": schema}) == [("f", {key: "xx"})]


@pytest.mark.parametrize("schema", [{"properties": ["a"]}, {"required": [{}]}, {"properties": {"a": {"anyOf": 5}}}])
def test_malformed_schemas_are_refused_by_the_compiler(schema: dict[str, Any]) -> None:
    grammar = Grammar(
        "calls", TOOL_FORMS["qwen3_coder"].calls([{"name": "f", "parameters": schema}], True), param="tools"
    )
    with pytest.raises(RequestError, match="tools is not a usable grammar"):
        COMPILER.compile(grammar, False)


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "olmo3"])
def test_many_tools_compile_within_bounds(name: str) -> None:
    properties = {f"p{i}": {"type": "string" if i % 3 else "integer"} for i in range(12)}
    functions = [{"name": f"tool_{i}", "parameters": {"type": "object", "properties": properties}} for i in range(40)]
    started = time.process_time()
    COMPILER.compile(Grammar("calls", TOOL_FORMS[name].calls(functions, False)), False)
    assert time.process_time() - started < 3


@pytest.mark.parametrize("is_special", [False, True])
def test_channels_precede_text_and_calls(is_special: bool, special: GrammarCompiler) -> None:
    """Reasoning may come first; a text is in the final channel."""
    compiler, form, channels = special if is_special else COMPILER, TOOL_FORMS["harmony"], REASONING_FORMS["harmony"]
    tokenizer = load_tokenizer(compiler._folder)
    around = {"before": channels.open, "after": channels.close, "lead": channels.lead}
    grammar = Grammar("regex", "[0-9]+", calls=form.calls(FUNCTIONS, True), **around)
    thought = "<|channel|>analysis<|message|>1 < 2, {so<|end|><|start|>assistant"
    answers = "<|channel|>final<|message|>12", written(form, PARIS)
    for text in (*answers, *(thought + answer for answer in answers)):
        assert accepts(compiler.compile(grammar, False), text, tokenizer)
    for text in ("12", thought, thought + "12", thought.replace("analysis", "final") + answers[0]):
        assert not accepts(compiler.compile(grammar, False), text, tokenizer)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", SCHEMA, '{"name": "get_weather", "age": 7}', '{"name": "get_weather", "old": 7}'),
        ("json_schema", '{"type": "object"}', '{"name": "get_weather", "arguments": 7}', '{"name": {"a"}}'),
        ("json_schema", '{"type": "array", "items": {"type": "integer"}}', "[1, 2]", '["a"]'),
        ("regex", "[0-9]{3}", "123", "12a"),
        ("choice", '["yes", "no"]', "no", "maybe"),
        ("ebnf", 'root ::= "a" root | "b"', "aab", "aa"),
        ("ebnf", 'start: "a" start | "b"', "aab", "aa"),
    ],
)
@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", TOOL_FORMS)
def test_an_answer_is_a_call_or_follows_the_grammar(
    name: str, is_special: bool, kind: GrammarKind, text: str, good: str, bad: str, special: GrammarCompiler
) -> None:
    """The arguments of a call that is not forced are any object."""
    form, compiler = TOOL_FORMS[name], special if is_special else COMPILER
    tokenizer = load_tokenizer(compiler._folder)
    grammar = Grammar(kind, text, calls=form.calls(FUNCTIONS, False, is_exact=False))
    for after in ("", "</think>"):
        either = msgspec.structs.replace(grammar, after=after)
        town = ("get_weather", '{"town": {}}')
        allowed = [good, written(form, PARIS), written(form, town, *([] if form.between is None else [ODD]))]
        assert [accepts(compiler.compile(either, False), after + t, tokenizer) for t in allowed] == [True] * 3
        refused = [bad, "Hello", written(form, ("get_time", "{}")).replace('"param', "{param")]  # not JSON, either
        assert [accepts(compiler.compile(either, False), after + t, tokenizer) for t in refused] == [False] * 3


def test_reasoning_ends_with_its_token_if_there_is_one(special: GrammarCompiler) -> None:
    """The text of the tag in other tokens does not end it, and other special tokens are not part of it."""
    grammar = Grammar("regex", "[0-9]+", after="</think>")
    tokenizer = load_tokenizer(special._folder)
    assert accepts(special.compile(grammar, False), "Well < 3, </thinks></think>12", tokenizer)
    assert not accepts(special.compile(grammar, False), "a <other></think>12", tokenizer)
    matcher = special.compile(grammar, False)
    for token in TOKENIZER.encode("a </think", add_special_tokens=False).ids:
        matcher.advance(token)
        special.compute_masks([matcher])
    assert TOKENIZER.encode(">", add_special_tokens=False).ids[0] not in allowed(matcher)


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("name", REASONING_FORMS)
def test_reasoning_of_each_form_ends_at_its_budget(name: str, is_bound: bool) -> None:
    """Random tokens stand for reasoning, and then for an answer, which a grammar may bind. Drafts find the same end."""
    form, budget, rng, bytes_of = REASONING_FORMS[name], 5, random.Random(0), TokenBytes(TOKENIZER)
    around = {"before": form.open, "lead": form.lead} if form.lead else {}
    grammar = COMPILER.compile(Grammar("choice", '["yes"]', after=form.close, **around), False) if is_bound else None
    thinking = Thinking(form.open, form.close, not form.lead, form.lead, budget)
    matcher, text, found = COMPILER.limit(thinking, grammar), b"", []
    usual = {i for i in range(3, VOCAB) if bytes_of[i].isalpha()}
    begun = TOKENIZER.encode(form.open, add_special_tokens=False).ids if form.lead else []
    for i in range(60):
        choices = allowed(matcher)
        token = begun[i] if i < len(begun) else rng.choice([*usual.intersection(choices)] or choices)
        assert matcher.count_allowed(np.array([token], np.int32)) == 1
        if len(forced := matcher.forced()):
            token = int(forced[0])
            masks = matcher.along(forced)
            assert len(masks) == len(forced) and matcher.count_allowed(forced) == len(forced)
        found.append(token)
        text += bytes_of[token]
        matcher.advance(token)
        if matcher.is_stale:
            COMPILER.compute_masks([matcher])
        if matcher.is_complete:
            break
    reasoning = b"".join(bytes_of[t] for t in found[len(begun) :][:budget])
    head = form.open.encode() * bool(form.lead) + reasoning + form.close.encode()
    assert text.startswith(head) and matcher.is_complete == is_bound
    assert not is_bound or text == head + form.lead.encode() + b"yes"
    counter = ThinkingCounter(thinking, bytes_of)
    for token in found:
        counter.feed(token)
    assert counter.count == budget and counter.has_closed and counter.is_over == (not form.lead)


def test_channels_of_reasoning_do_not_begin_again() -> None:
    form = REASONING_FORMS["harmony"]
    matcher = COMPILER.limit(Thinking(form.open, form.close, lead=form.lead, budget=0), None)
    texts = form.open, form.close, form.open.partition("analysis")[0]
    for token in itertools.chain(*(TOKENIZER.encode(text, add_special_tokens=False).ids for text in texts)):
        assert token in allowed(matcher)
        matcher.advance(token)
    (other,) = {*range(VOCAB)} - {*allowed(matcher)}
    assert "analysis".startswith(TOKENIZER.decode([other]))


def test_a_grammar_that_becomes_too_large_is_refused_with_its_field() -> None:
    matcher = compiled("regex", "((a{1000}){1000}){1000}")

    def follow() -> None:
        for _ in range(1000):
            advance(matcher, allowed(matcher)[-1])

    with pytest.raises(RequestError, match=r"cannot be followed|masks take") as e:
        follow()
    assert (e.value.param, e.value.code) == ("grammar", "invalid_grammar")


def test_masks_in_parallel_equal_masks_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By threads, where there are cores for them; one that cannot be followed costs no other."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    texts = ["[a-z ]{20}", "a+b?", "[0-9]{2,5}", "(ab)*c", "[^x]+"]
    alone, together = ([compiled("regex", text) for text in texts] for _ in range(2))
    one = compiled("regex", "[a-z ]{20}")
    COMPILER.compute_masks([one])
    assert "_executor" not in COMPILER.__dict__, "a trial, which has one matcher, has no memory for threads"
    monkeypatch.setitem(COMPILER.__dict__, "_executor", GrammarCompiler._executor.func(COMPILER))
    for _ in range(5):
        for a, b in zip(alone, together, strict=True):
            token = allowed(a)[len(allowed(a)) // 2]
            b.advance(token)
            advance(a, token)
        COMPILER.compute_masks(together)
        assert [m.error for m in together] == [None] * len(texts)
        assert [allowed(m) for m in together] == [allowed(m) for m in alone]
    together[1].advance(TOKENIZER.encode("z").ids[0])
    COMPILER.compute_masks(together)
    errors = [m.error for m in together]
    assert [error is not None for error in errors] == [False, True, False, False, False]
    assert "cannot be followed" in str(errors[1])


@pytest.mark.parametrize("value", [1e30, -(2**63), 2**53 + 1])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_beyond_exact_numbers_are_narrowed_or_refused_by_keyword(value: float, kind: str) -> None:
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        schema = json.dumps({"type": "object", "properties": {"a": {"type": kind, keyword: value}}, "required": ["a"]})
        if (value > 0) == keyword.endswith("aximum") and keyword != "multipleOf":
            inside = 2**53 - 1 if value > 0 else -(2**53) + 1
            assert accepts(compiled("json_schema", schema), f'{{"a": {inside}}}')
            assert not accepts(compiled("json_schema", schema), f'{{"a": {int(value * 2)}}}')
        else:
            with pytest.raises(RequestError, match=keyword):
                compiled("json_schema", schema)


def test_nesting_is_bounded() -> None:
    compiled("json_schema", '{"items":' * 99 + '{"type": "integer"}' + "}" * 99)
    with pytest.raises(RequestError, match="more than 200 levels"):
        compiled("json_schema", '{"items":' * 300 + "{}" + "}" * 300)


@pytest.mark.parametrize("text", ['{"name": "Bob", "age": 31}', '{"name": "", "age": -7}'])
def test_masks_along_drafts_are_those_of_sampled_tokens(text: str) -> None:
    tokens = np.array(TOKENIZER.encode(text, add_special_tokens=False).ids, np.int32)
    plain, drafted = compiled("json_schema", SCHEMA), compiled("json_schema", SCHEMA)
    for start in range(0, len(tokens), 5):
        drafts = tokens[start : start + 5]
        assert drafted.count_allowed(np.append(drafts, EOS)) == len(drafts)
        masks = drafted.along(drafts)
        for token, mask in zip(drafts.tolist(), masks, strict=True):
            advance(plain, token)
            drafted.advance(token)
            assert not drafted.is_stale
            assert (mask == plain.mask).all() and (drafted.mask == plain.mask).all()
            assert drafted.is_complete == plain.is_complete
    assert plain.is_complete


def test_a_draft_that_is_not_sampled_leaves_no_trace() -> None:
    matcher = compiled("json_schema", SCHEMA)
    forced = matcher.forced()
    assert TOKENIZER.decode(forced.tolist()) == '{"name":'
    wrong = np.array([*forced[:1], 5, 6], np.int32)
    assert matcher.count_allowed(wrong) == 1 and len(matcher.along(wrong)) == 3
    for token in forced.tolist():
        advance(matcher, token)
    assert matcher.error is None and not len(matcher.forced())
    matcher.along(np.array(TOKENIZER.encode(' "a', add_special_tokens=False).ids, np.int32))
    assert accepts(matcher, ' "b", "age": 3}')
