"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from headwater.errors import ContextTooLong, InvalidRequest
from headwater.frontend.openai.answers import DetokenizeAnswer, TokenizeAnswer
from headwater.frontend.openai.chat import prompt_text
from headwater.frontend.openai.model import ModelLookup, ServedModel, served
from headwater.frontend.openai.parse import Plain, Shape, parse_body
from headwater.frontend.openai.schema import DetokenizeRequest, TokenizeRequest
from headwater.frontend.preprocess.tokenizer import unpack_ids

TOKENIZE = Shape.of(TokenizeRequest, {})
DETOKENIZE = Shape.of(DetokenizeRequest, {})


def tokenize(body: bytes, models: ModelLookup, *, strict: bool) -> TokenizeAnswer:
    """Ids exactly as a completion with the same prompt or messages would send them. Raises `RequestError`."""
    parsed = parse_body(TOKENIZE, body, strict=strict)
    fields = parsed.fields
    model = served(models, fields.model)
    text, special = _text(fields, parsed.plain, model)
    param = "prompt" if fields.prompt is not None else "messages"
    ids = unpack_ids(model.limits.encode(model.tokenizer, text, param, add_special_tokens=special))
    spelled = [model.vocabulary_text(token_id) for token_id in ids] if fields.return_token_strs else None
    return TokenizeAnswer(len(ids), model.card.max_model_len, ids, spelled)


def _text(fields: TokenizeRequest, plain: Plain, model: ServedModel) -> tuple[str, bool]:
    """The text and whether special tokens are added to it."""
    given = fields.add_special_tokens
    if fields.prompt is not None:
        if fields.messages is not None:
            raise InvalidRequest("prompt and messages are both given, expected one of them", param="prompt")
        return fields.prompt, True if given is None else given
    if fields.messages is None:
        raise InvalidRequest("prompt and messages are missing or null, expected one of them", param="prompt")
    return prompt_text(fields.messages, fields, plain, model, tools_shown=bool(fields.tools)), bool(given)


def detokenize(body: bytes, models: ModelLookup, *, strict: bool) -> DetokenizeAnswer:
    """The text of ids, special tokens written out. Raises `RequestError`."""
    fields = parse_body(DETOKENIZE, body, strict=strict).fields
    model = served(models, fields.model)
    count, most = len(fields.tokens), model.card.max_model_len
    if count > most:
        raise ContextTooLong(f"tokens has {count:,} ids, the model's context is {most:,}", param="tokens")
    for number, token_id in enumerate(fields.tokens):
        if token_id >= model.vocab_size:
            raise InvalidRequest(
                f"tokens[{number}] is {token_id:,}, expected a token id from 0 to {model.vocab_size - 1:,}",
                param=f"tokens[{number}]",
            )
    return DetokenizeAnswer(model.tokenizer.decode(fields.tokens, skip_special_tokens=False))
