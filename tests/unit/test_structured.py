"""Structured output: compile, mask, replay, refuse. Tokens are bytes, a few words and one end token."""

import json
import re
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headwater.engines.native.structured.base import DeadEndError
from headwater.engines.native.structured.guidance import MAX_SPEC_CHARS, GuidanceCompiler, GuidanceConstraint
from headwater.errors import InvalidRequest
from headwater.protocol.request import StructuredKind, StructuredSpec

EOS = 0
WORDS = ["true", "name", "yes", "no", "12"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def byte_tokenizer() -> Tokenizer:
    """Every byte, some words, `<|end|>` as token 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": EOS} | {char: 1 + number for number, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def vocab_size(tokenizer: Tokenizer) -> int:
    return tokenizer.get_vocab_size() + 13  # models pad their vocabulary


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, vocab_size: int) -> GuidanceCompiler:
    return GuidanceCompiler(tokenizer.to_str().encode(), vocab_size, [EOS])


def allowed(constraint: GuidanceConstraint, vocab_size: int) -> list[int]:
    logits = np.zeros(vocab_size, dtype=np.float32)
    constraint.mask(logits)
    return np.flatnonzero(logits > -np.inf).tolist()


def generate(
    constraint: GuidanceConstraint, vocab_size: int, generator: np.random.Generator, limit: int = 400
) -> list[int]:
    """Follow the mask at random until only the end token, or the end token itself, is drawn."""
    tokens: list[int] = []
    while len(tokens) < limit:
        token = int(generator.choice(allowed(constraint, vocab_size)))
        if token == EOS:
            return tokens
        tokens.append(token)
        constraint.advance([token])
    pytest.fail(f"no end after {limit} tokens")


@pytest.mark.parametrize("seed", range(8))
def test_json_schema_outputs_parse_and_validate(
    compiler: GuidanceCompiler, tokenizer: Tokenizer, vocab_size: int, seed: int
) -> None:
    constraint = compiler.compile(StructuredSpec("json_schema", json.dumps(SCHEMA)))
    text = tokenizer.decode(generate(constraint, vocab_size, np.random.default_rng(seed), 2000))
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert 0 <= value["age"] <= 150
    assert len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"a", "b"}


@pytest.mark.parametrize(
    ("kind", "spec", "pattern"),
    [
        ("regex", r"[a-c]{2,5}-\d{3}", r"[a-c]{2,5}-\d{3}"),
        ("choice", '["yes", "no", "na\\u00efve \\"quoted\\" \\\\ / \\n"]', 'yes|no|naïve "quoted" \\\\ / \n'),
        ("grammar", 'start: word ("," word)*\nword: /[xyz]{1,2}/', r"[xyz]{1,2}(,[xyz]{1,2})*"),
        ("grammar", 'root ::= "yes" | digit digit\ndigit ::= [0-9]', r"yes|[0-9]{2}"),
    ],
)
def test_other_kinds(
    compiler: GuidanceCompiler, tokenizer: Tokenizer, vocab_size: int, kind: StructuredKind, spec: str, pattern: str
) -> None:
    for seed in range(5):
        constraint = compiler.compile(StructuredSpec(kind, spec))
        text = tokenizer.decode(generate(constraint, vocab_size, np.random.default_rng(seed)))
        assert re.fullmatch(pattern, text), text


def test_json_object_begins_with_a_brace(compiler: GuidanceCompiler, tokenizer: Tokenizer, vocab_size: int) -> None:
    constraint = compiler.compile(StructuredSpec("json_object"))
    assert [tokenizer.id_to_token(token) for token in allowed(constraint, vocab_size)] == ["{"]


def test_only_the_end_token_follows_a_complete_output(
    compiler: GuidanceCompiler, tokenizer: Tokenizer, vocab_size: int
) -> None:
    constraint = compiler.compile(StructuredSpec("choice", '["yes"]'))
    assert not constraint.complete
    constraint.advance(tokenizer.encode("yes").ids)
    assert constraint.complete
    assert allowed(constraint, vocab_size) == [EOS]
    constraint.advance([EOS, EOS])  # ignored by the client's wish
    assert allowed(constraint, vocab_size) == [EOS]


def test_blanks_are_bounded(compiler: GuidanceCompiler, tokenizer: Tokenizer, vocab_size: int) -> None:
    constraint = compiler.compile(StructuredSpec("json_object"))
    constraint.advance(tokenizer.encode("{").ids)
    blank = tokenizer.encode(" ").ids[0]
    for _ in range(40):
        assert blank in allowed(constraint, vocab_size)
        constraint.advance([blank])
    assert blank not in allowed(constraint, vocab_size)


def test_state_is_replayed_from_tokens(compiler: GuidanceCompiler, vocab_size: int) -> None:
    spec = StructuredSpec("json_schema", json.dumps(SCHEMA))
    running = compiler.compile(spec)
    tokens: list[int] = []
    generator = np.random.default_rng(5)
    for _ in range(40):
        choices = allowed(running, vocab_size)
        moved = compiler.compile(spec)
        moved.advance(tokens)
        assert moved.num_tokens == running.num_tokens == len(tokens)
        assert allowed(moved, vocab_size) == choices
        token = int(generator.choice(choices))
        if token == EOS:
            break
        tokens.append(token)
        running.advance([token])


def test_sequences_with_one_grammar_do_not_disturb_each_other(
    compiler: GuidanceCompiler, tokenizer: Tokenizer, vocab_size: int
) -> None:
    first = compiler.compile(StructuredSpec("choice", '["yes", "no"]'))
    second = compiler.compile(StructuredSpec("choice", '["yes", "no"]'))
    first.advance(tokenizer.encode("y").ids)
    assert tokenizer.encode("n").ids[0] in allowed(second, vocab_size)
    assert tokenizer.encode("n").ids[0] not in allowed(first, vocab_size)


def test_a_token_against_the_grammar_is_a_dead_end(compiler: GuidanceCompiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.compile(StructuredSpec("choice", '["yes"]'))
    with pytest.raises(DeadEndError, match="structured output"):
        constraint.advance(tokenizer.encode("q").ids)


def test_mask_keeps_the_logits_of_allowed_tokens(compiler: GuidanceCompiler, vocab_size: int) -> None:
    constraint = compiler.compile(StructuredSpec("regex", "[a-f]"))
    logits: NDArray[np.float32] = np.random.default_rng(0).normal(size=vocab_size).astype(np.float32)
    masked = logits.copy()
    constraint.mask(masked)
    kept = masked > -np.inf
    assert kept.sum() == 6
    assert np.array_equal(masked[kept], logits[kept])


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("json_schema", '{"type": "strin"}', 'type at # is "strin", expected one of array, boolean'),
        ("json_schema", '{"type":', "EOF while parsing"),
        ("json_schema", "[1]", "it is [1], expected an object"),
        ("json_schema", "false", "it is false, which no value fits"),
        ("json_schema", '{"items": {"pattern": "x(a"}}', 'pattern at #/items is "x(a": unclosed group, at character 2'),
        ("json_schema", '{"not": {"type": "string"}}', "not at # cannot be held to"),
        (
            "json_schema",
            '{"properties": {"if": {}, "a/b": {"if": {}, "then": {}}}}',
            "if and then at #/properties/a~1b cannot be held to",
        ),
        ("json_schema", '{"oneOf": [{"type": "null"}, {}]}', "members of oneOf at # may both fit: use anyOf"),
        ("json_schema", '{"anyOf": [{"format": "nope"}]}', 'format at #/anyOf/0 is "nope", which is not known'),
        ("json_schema", '{"$ref": "http://x/y"}', '$ref at # is "http://x/y", expected a place in the same schema'),
        ("json_schema", '{"items": {"$ref": "#/no"}}', '$ref at #/items is "#/no", where nothing is'),
        ("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}', "no value fits it: minimum (2)"),
        ("regex", "x(a", "which cannot be compiled: unclosed group, at character 2"),
        ("regex", "/(a", "which cannot be compiled: unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"\bfoo", "look-around and word boundaries are not supported"),
        ("regex", "[a&&b]", "no text can satisfy it"),
        ("choice", "[]", "one or more"),
        ("choice", "[1]", "strings"),
        ("choice", "{", "Expecting"),
        ("grammar", "start: missing", 'at line 1, column 8: unknown name: "missing"'),
        ("grammar", "start: start", "no text can satisfy it"),
        ("grammar", 'root ::= "a" missing', "missing"),
        ("grammar", "root ::= " + "(" * 20_000, "deep"),
        ("regex", "a" * (MAX_SPEC_CHARS + 1), str(MAX_SPEC_CHARS)),
    ],
)
def test_bad_specifications_are_refused(
    compiler: GuidanceCompiler, kind: StructuredKind, spec: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(StructuredSpec(kind, spec, "structured_outputs.x"))
    message = str(refused.value)
    assert words in message
    assert message.startswith("structured_outputs.x")
    assert refused.value.param == "structured_outputs.x"
    assert len(message) < 700
    assert "NoExtension" not in message
    assert "start: /" not in message


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#"}, "the $ref at # leads only to itself, expected a schema"),
        (
            {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/a%20b"}}},
            "the $ref at #/$defs/a b leads only to itself by way of #/$defs/c, expected a schema",
        ),
        ({"allOf": [{"type": "object"}, {"$ref": "#"}]}, "a $ref leads back to # where other keywords"),
    ],
)
def test_a_schema_that_only_leads_to_itself_is_refused_by_its_place(
    compiler: GuidanceCompiler, schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(StructuredSpec("json_schema", json.dumps(schema)))
    assert words in str(refused.value)


def test_a_schema_that_refers_to_itself_with_an_end_in_sight_is_compiled(compiler: GuidanceCompiler) -> None:
    compiler.compile(StructuredSpec("json_schema", '{"anyOf": [{"type": "null"}, {"items": {"$ref": "#"}}]}'))


def test_a_schema_that_any_value_fits_is_compiled(compiler: GuidanceCompiler) -> None:
    compiler.compile(StructuredSpec("json_schema", "true"))


def test_looking_for_places_takes_memory_as_the_schema_does(compiler: GuidanceCompiler) -> None:
    """Pointers to all of its parts would hold a gigabyte."""
    many: dict[str, Any] = {f"p{number}": {} for number in range(5000)}
    spec = json.dumps({"properties": {"x" * 60_000: {"properties": many | {"last": {"not": {}}}}}})
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="not at #/properties/xxx"):
        compiler.compile(StructuredSpec("json_schema", spec))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


def test_deeply_nested_schemas_are_refused(compiler: GuidanceCompiler) -> None:
    spec = '{"items":' * 10_000 + "{}" + "}" * 10_000
    with pytest.raises(InvalidRequest):
        compiler.compile(StructuredSpec("json_schema", spec))


def test_a_model_without_end_token_is_refused(tokenizer: Tokenizer, vocab_size: int) -> None:
    compiler = GuidanceCompiler(tokenizer.to_str().encode(), vocab_size, [])
    with pytest.raises(InvalidRequest, match="end token"):
        compiler.compile(StructuredSpec("json_object"))


def test_hostile_grammars_end_in_bounded_work(compiler: GuidanceCompiler, vocab_size: int) -> None:
    """Either refused, or a dead end of that one sequence; never an endless step (the test would time out)."""
    bombs = [
        StructuredSpec("regex", "(a|b|ab|ba){1,1000}(x{0,1000}){0,1000}"),
        StructuredSpec("regex", "(.*a){1,40}.{0,4000}"),
        StructuredSpec("grammar", 'start: start start | "a" | start'),
        StructuredSpec("grammar", "root ::= [a-z]{1,100000} root | root root"),
        StructuredSpec("json_schema", json.dumps({"anyOf": [{"pattern": f"^(.*{i}){{9}}$"} for i in range(300)]})),
    ]
    for spec in bombs:
        try:
            constraint = compiler.compile(spec)
            for _ in range(20):
                choices = allowed(constraint, vocab_size)
                constraint.advance([choices[len(choices) // 2]])
        except (InvalidRequest, DeadEndError):
            continue


@pytest.mark.parametrize("regex", ["a{1000000}", "((a?){50}){50}a{50}"])
def test_what_could_not_even_begin_is_refused(compiler: GuidanceCompiler, regex: str) -> None:
    with pytest.raises(InvalidRequest, match=r"it is too complex \(too many expressions\)"):
        compiler.compile(StructuredSpec("regex", regex))


def test_a_grammar_is_compiled_once_from_any_thread(
    compiler: GuidanceCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = StructuredSpec("regex", "prepared+")
    thread = threading.Thread(target=compiler.prepare, args=(spec,))
    thread.start()
    thread.join()
    monkeypatch.setattr(compiler, "_compile", None)
    compiler.compile(spec)
    compiler.compile(StructuredSpec(spec.kind, spec.spec, "structured_outputs.regex"))


def test_large_lists_and_schemas_work(compiler: GuidanceCompiler, tokenizer: Tokenizer, vocab_size: int) -> None:
    choices = [f"choice {number}" for number in range(5000)]
    generator = np.random.default_rng(0)
    constraint = compiler.compile(StructuredSpec("choice", json.dumps(choices)))
    assert tokenizer.decode(generate(constraint, vocab_size, generator)) in choices
    schema = {"type": "object", "properties": {f"property_{number}": {"type": "null"} for number in range(2000)}}
    constraint = compiler.compile(StructuredSpec("json_schema", json.dumps(schema)))
    constraint.advance(tokenizer.encode('{"property_1999": ').ids)
    assert tokenizer.encode("n").ids[0] in allowed(constraint, vocab_size)


def test_the_cache_is_bounded_and_keeps_what_is_used(compiler: GuidanceCompiler) -> None:
    often = StructuredSpec("regex", "often+")
    for number in range(600):
        compiler.compile(StructuredSpec("regex", f"once{number}"))
        compiler.compile(often)
    kept = compiler._compiled
    assert ("regex", "often+") in kept
    assert 100 < len(kept) < 300
    assert ("regex", "once599") in kept
    assert ("regex", "once0") not in kept
