"""`headwater chat`: talk to any OpenAI-compatible server; shows time to first token and tokens per second."""

import argparse
import http.client
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from headwater.cli.http import MAX_BODY_BYTES, Server, error_message
from headwater.cli.parser import seconds
from headwater.cli.target import add_target, server_of
from headwater.errors import DeadlineExceeded, HeadwaterError, Unavailable, WorkerLost

_MAX_EVENT_BYTES = 4 * 1024 * 1024
_POLL_S = 0.3
_HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer"

Message = dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model name; default: the first the server lists")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--once", metavar="PROMPT", help="ask this one thing, print the answer and leave")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer; default: the server's")
    parser.add_argument("--temperature", type=float, metavar="X", help="default: the server's")
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="TIME", help="longest silence of the server")
    parser.add_argument("--wait", type=seconds, default=0.0, metavar="TIME", help="wait for a server to become ready")
    add_target(parser)


def run(args: argparse.Namespace) -> int:
    server, model = find_server(args)
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    chat = Conversation(
        server,
        model,
        [{"role": "system", "content": args.system}] if args.system else [],
        {name: value for name, value in options.items() if value is not None},
    )
    if args.once is not None:
        if sys.stderr.isatty():
            print(f"> {args.once}", file=sys.stderr)
        answer = chat.ask(args.once)
        print(f"\n{answer.figures()}", file=sys.stderr)
        return 0 if answer.complete else 1
    return converse(chat)


def find_server(args: argparse.Namespace) -> tuple[Server, str]:
    """The server and the model to talk to, as soon as there are both. A refusal (no key, say) is not waited out."""
    deadline = time.monotonic() + args.wait
    while True:
        try:
            server = server_of(args, args.timeout)
            return server, args.model or first_model(server)
        except Unavailable as error:
            if args.wait and time.monotonic() >= deadline:
                raise DeadlineExceeded(f"not ready in time: {error.message}", hint=error.hint) from error
            if not args.wait:
                raise
        time.sleep(_POLL_S)


def first_model(server: Server) -> str:
    try:
        return str(server.get_json("/v1/models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        hint = "one may be loading: --wait 10m, or give --model"
        raise Unavailable(f"{server.url}/v1/models names no model", hint=hint) from error


def converse(chat: "Conversation") -> int:
    """Until the end of input or /exit. A failed answer does not end the conversation."""
    with suppress(ImportError):
        import_module("readline")  # gives input() its line editing
    print(f"{chat.model} at {chat.server.url}; {_HELP}")
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text in ("/exit", "/quit"):
            return 0
        if text == "/reset":
            chat.reset()
        elif text.startswith("/"):
            print(_HELP)
        elif text:
            _answer(chat, text)


def _answer(chat: "Conversation", text: str) -> None:
    try:
        answer = chat.ask(text)
    except HeadwaterError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return
    print(f"\n[{answer.figures()}]")


@dataclass(slots=True)
class Answer:
    """One answer and its times, in seconds of a monotonic clock."""

    asked_at: float
    text: str = ""
    first_at: float | None = None
    last_at: float = 0.0
    pieces: int = 0
    completion_tokens: int | None = None
    finish_reason: str | None = None
    interrupted: bool = False

    @property
    def complete(self) -> bool:
        return self.finish_reason is not None

    def add(self, piece: str, at: float) -> None:
        self.first_at = at if self.first_at is None else self.first_at
        self.last_at = at
        self.pieces += 1
        self.text += piece

    def figures(self) -> str:
        """`TTFT 210 ms, 34 tokens, 21.3 tokens/s`. Pieces stand in for tokens when the server gives no usage."""
        if self.first_at is None:
            return "no answer"
        tokens = self.completion_tokens or self.pieces
        parts = [f"TTFT {1000 * (self.first_at - self.asked_at):.0f} ms", f"{tokens} tokens"]
        if tokens > 1 and self.last_at > self.first_at:
            parts.append(f"{(tokens - 1) / (self.last_at - self.first_at):.1f} tokens/s")
        if self.interrupted:
            parts.append("stopped")
        elif self.finish_reason != "stop":
            parts.append(f"ended by {self.finish_reason or 'a broken connection'}")
        return ", ".join(parts)


@dataclass(slots=True)
class Conversation:
    server: Server
    model: str
    messages: list[Message]
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def reset(self) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def ask(self, text: str) -> Answer:
        """Print the answer as it comes; Ctrl-C closes the connection, which stops the server's work too."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        answer = Answer(time.monotonic())
        connection, response = self.server.open("POST", "/v1/chat/completions", body)
        with closing(connection):
            if response.status != http.client.OK:
                raise HeadwaterError(error_message(response.read(MAX_BODY_BYTES)))
            try:
                for event in events_of(response):
                    _take(answer, event)
            except KeyboardInterrupt:
                answer.interrupted = True
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


def events_of(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`."""
    try:
        while line := response.readline(_MAX_EVENT_BYTES):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if not isinstance(event, dict):
                raise WorkerLost("the server sent something that is no event")
            yield event
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise WorkerLost(f"the stream broke: {str(error) or type(error).__name__}") from error


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise HeadwaterError(error_message(json.dumps(event).encode()))
    usage = event.get("usage")
    if isinstance(usage, dict):
        answer.completion_tokens = usage.get("completion_tokens")
    for choice in event.get("choices") or []:
        piece = (choice.get("delta") or {}).get("content")
        if piece:
            answer.add(piece, time.monotonic())
            sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
            sys.stdout.flush()
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def printable(text: str) -> str:
    """Without control characters: a model's output must not steer the terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")
