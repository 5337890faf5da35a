"""Structured output through llguidance.

Specifications come from outside: their size is bounded, compilation runs under llguidance's limits on grammar size and
lexer work, and what it refuses becomes `InvalidRequest`. Compiled grammars are kept in a bounded cache; a sequence
works on a copy. Compiling takes up to a second and does not hold the interpreter's lock.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from headwater.engines.native.structured.base import DeadEndError
from headwater.engines.native.structured.refusals import in_words, refusal
from headwater.protocol.request import StructuredKind, StructuredSpec

MAX_SPEC_CHARS = 128 * 1024
_CACHED_CHARS = 1024 * 1024
"""Compiled grammars are kept while their specifications together are no longer than this."""
_ENTRY_CHARS = 4096
"""Counted for each beside its length, so that many short ones do not pile up either."""
_MAX_LEXER_STATES = 25_000
"""Of one sequence, 1 to 2 kB each: hostile expressions could fill the memory with the library's own limit."""
_MAX_ROW_ITEMS = 20_000
"""Lets through schemas with thousands of properties; the work per step has a limit of its own."""
_INITIAL_LEXER_FUEL = 100_000
"""A tenth of the library's own limit, under which a step with `a{100000}` takes 100 ms. Schemas with thousands of
properties stay within it."""
_ASCII_CLASSES = "d"
r"""`\d` means 0 to 9, as everyone who writes it for a model expects; `\w` and `\s` know Unicode."""
_JSON_BLANKS = r"[\x20\x0A\x0D\x09]{0,40}"
"""Room for pretty printing, but a small model cannot write blanks until its tokens run out."""

_Key = tuple[StructuredKind, str]
"""Kind and text of a specification: whichever field asks for it."""


class GuidanceCompiler:
    """Compiles for one tokenizer. Building it costs a few hundred milliseconds."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = LLTokenizer(
            tokenizer_json.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
        )
        self._limits = LLParserLimits(
            verbose_errors=False,
            initial_lexer_fuel=_INITIAL_LEXER_FUEL,
            max_lexer_states=_MAX_LEXER_STATES,
            max_items_in_row=_MAX_ROW_ITEMS,
        )
        self._vocab_size = vocab_size
        self._has_end = bool(eos_token_ids)
        self._bounds_by_byte = _bounds_by_byte()
        self._compiled: OrderedDict[_Key, LLMatcher] = OrderedDict()
        self._cached_chars = 0
        self._lock = threading.Lock()
        """Of the two fields above."""

    def prepare(self, spec: StructuredSpec) -> None:
        self._matcher(spec)

    def compile(self, spec: StructuredSpec) -> "GuidanceConstraint":
        return GuidanceConstraint(self._matcher(spec).deep_copy(), self._vocab_size, self._bounds_by_byte)

    def _matcher(self, spec: StructuredSpec) -> LLMatcher:
        key = (spec.kind, spec.spec)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
                return matcher
        matcher = self._compile(spec)
        with self._lock:
            self._keep(key, matcher)
        return matcher

    def _keep(self, key: _Key, matcher: LLMatcher) -> None:
        if self._compiled.setdefault(key, matcher) is not matcher:
            return  # another thread was faster
        self._cached_chars += _cached_chars(key)
        while self._cached_chars > _CACHED_CHARS:
            oldest, _ = self._compiled.popitem(last=False)
            self._cached_chars -= _cached_chars(oldest)

    def _compile(self, spec: StructuredSpec) -> LLMatcher:
        if not self._has_end:
            raise refusal(spec, "this model has no end token, so a structured output could not end")
        size = len(spec.spec)
        if size > MAX_SPEC_CHARS:
            raise refusal(spec, f"the specification has {size} characters, at most {MAX_SPEC_CHARS} are compiled")
        try:
            grammar = _grammar(spec)
        except (ValueError, RecursionError) as error:
            raise refusal(spec, str(error)) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        wrong = _first_error(matcher)
        if wrong:
            raise refusal(spec, wrong)
        return matcher


class GuidanceConstraint:
    """One sequence's place in a grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, bounds_by_byte: NDArray[np.float32]) -> None:
        self._matcher = matcher
        self._bounds_by_byte = bounds_by_byte
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        self.num_tokens = 0
        self.complete = False

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in output tokens. Once complete, further tokens (end tokens that were ignored) change nothing."""
        self.num_tokens += len(tokens)
        for token in tokens:
            if self.complete:
                return
            if not self._matcher.consume_token(token):
                raise self._dead_end()
            self.complete = self._matcher.is_stopped()

    def mask(self, logits: NDArray[np.float32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise self._dead_end()
        if not self._bits.any():
            raise DeadEndError("structured output: no token can follow under the grammar")
        bounds = self._bounds_by_byte[self._bits.view(np.uint8)].reshape(-1)
        np.minimum(logits, bounds[: len(logits)], out=logits)

    def _dead_end(self) -> DeadEndError:
        return DeadEndError(f"structured output: {in_words(self._matcher.get_error())}")


def _first_error(matcher: LLMatcher) -> str:
    """What is wrong with a new grammar; empty: nothing. Some limits show only with the first token."""
    if not matcher.is_error():
        allowed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if not matcher.is_error() and allowed.any():
            trial = matcher.deep_copy()
            trial.consume_token(int(np.unpackbits(allowed, bitorder="little").argmax()))
            return str(trial.get_error())
    return str(matcher.get_error())


def _bounds_by_byte() -> NDArray[np.float32]:
    """For each byte of a bitmask, upper bounds for the eight logits it covers."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.inf, -np.inf).astype(np.float32)


def _grammar(spec: StructuredSpec) -> str:
    """The specification in llguidance's own format. Raises `ValueError` or `RecursionError`."""
    match spec.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema(
                '{"type": "object"}', overrides={"whitespace_pattern": _JSON_BLANKS}
            )
        case "json_schema":
            # Any value fits `true`, which is a schema that takes no options.
            schema = "{}" if spec.spec.strip() == "true" else spec.spec
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _JSON_BLANKS})
        case "regex":
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.spec, _ASCII_CLASSES)}/")
        case "choice":
            return LLMatcher.grammar_from_lark(_choice_grammar(spec.spec))
        case "grammar":
            return LLMatcher.grammar_from_lark(_lark(spec.spec))


def _choice_grammar(spec: str) -> str:
    choices = json.loads(spec)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("choices must be a list of one or more strings")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _cached_chars(key: _Key) -> int:
    return len(key[1]) + _ENTRY_CHARS


def _lark(text: str) -> str:
    try:
        return any_to_lark(text)
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    except Exception as error:  # the converter raises bare exceptions
        raise ValueError(str(error)) from error
