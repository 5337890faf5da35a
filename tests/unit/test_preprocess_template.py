"""Chat templates: equal to transformers, caged, and refusals that reach the client."""

from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headwater.clock import VirtualClock
from headwater.errors import InvalidRequest, ModelError
from headwater.frontend.preprocess.samples import sample_chats
from headwater.frontend.preprocess.template import ChatTemplate
from headwater.weights import ResolvedModel

FOLDER = Path(__file__).parent.parent / "templates"
"""Templates with the constructs of widely used ones."""

BREAKS = """
{%- for message in messages %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- message.content|trim }}
{%- endfor %}"""

MARKED = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"

FORMATTED = "{% for m in messages %}{{ '%s> %s\n' % (m.role, m.content) }}{% endfor %}"

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
FILES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
CASES = [(source, "minijinja") for source in (*FILES.values(), BREAKS)] + [(MARKED, "jinja2"), (FORMATTED, "jinja2")]


def clock() -> VirtualClock:
    return VirtualClock(1_800_000_000)


def outcome(render: Any) -> str | None:
    """The text, or None for a refusal."""
    try:
        return str(render())
    except (InvalidRequest, ModelError, jinja2.TemplateError, TypeError):
        return None


def by_transformers(source: str, messages: Any, tools: Any, prompt: bool, **extra: Any) -> str:
    rendered, _ = render_jinja_template([messages], tools, None, source, add_generation_prompt=prompt, **extra)
    return str(rendered[0])


@pytest.mark.parametrize(("source", "backend"), CASES, ids=[*FILES, "breaks", "marked", "formatted"])
def test_equal_to_transformers(source: str, backend: str) -> None:
    template = ChatTemplate(source, TOKENS, clock())
    assert template.backend == backend
    rendered = 0
    for chat in sample_chats():
        extra = {**TOKENS, "date_string": "1 Jan 2027"}
        expected = outcome(
            lambda chat=chat, extra=extra: by_transformers(
                source, chat.messages, chat.tools, chat.add_generation_prompt, **extra
            )
        )
        got = outcome(
            lambda chat=chat: template.render(
                chat.messages,
                tools=chat.tools,
                add_generation_prompt=chat.add_generation_prompt,
                extra={"date_string": "1 Jan 2027"},
            )
        )
        assert got == expected, chat.name
        rendered += expected is not None
    assert rendered >= 3


def test_the_demo_model_equals_transformers(demo_model: ResolvedModel) -> None:
    assert demo_model.chat_template is not None
    template = ChatTemplate(demo_model.chat_template, {}, clock())
    assert template.backend == "minijinja"
    assert not template.takes_tools
    for chat in sample_chats()[:5]:
        expected = by_transformers(demo_model.chat_template, chat.messages, None, chat.add_generation_prompt)
        assert template.render(chat.messages, add_generation_prompt=chat.add_generation_prompt) == expected


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("final", ["To be", "To be \n", "  To be, or"])
def test_continuing_the_final_message_equals_transformers(name: str, final: str) -> None:
    source = FILES[name]
    messages = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": final}]
    extra = {**TOKENS, "date_string": "today"}
    expected = by_transformers(source, messages, None, False, continue_final_message=True, **extra)
    template = ChatTemplate(source, TOKENS, clock())
    got = template.render(
        messages, add_generation_prompt=False, continue_final_message=True, extra={"date_string": "today"}
    )
    assert got == expected


def test_the_date_comes_from_the_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m') }}", {}, clock())
    assert template.render([{"role": "user", "content": ""}]) == "2027-01"


def test_a_refusal_says_why() -> None:
    template = ChatTemplate(FILES["alternating"], TOKENS, clock())
    with pytest.raises(InvalidRequest, match="no system role here") as caught:
        template.render([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
    assert caught.value.param == "messages"


def test_a_corner_that_minijinja_lacks_is_rendered_by_jinja2() -> None:
    source = "{% for m in messages %}{{ 'a b'.rsplit(' ', 1)[0] if m.content == 'rare' else m.content }}{% endfor %}"
    template = ChatTemplate(source, {}, clock())
    assert template.backend == "minijinja", "the samples do not reach it"
    assert template.render([{"role": "user", "content": "rare"}]) == "a"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_cage_holds(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    text = outcome(lambda: ChatTemplate(source, {}, clock()).render(messages))
    assert text is None or "class" not in text
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}x{% endfor %}{% endfor %}",
        "{% for a in range(90000) %}{{ 'x' * 90000 }}{% endfor %}",
    ],
)
def test_a_runaway_template_is_stopped(source: str) -> None:
    guarded = "{% if messages[0].content == 'run' %}" + source + "{% endif %}"
    with pytest.raises(InvalidRequest):
        ChatTemplate(guarded, {}, clock()).render([{"role": "user", "content": "run"}])


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", {}, clock())


@pytest.mark.parametrize(("source", "takes"), [(FILES["tagged_calls"], True), (FILES["alternating"], False)])
def test_whether_tools_are_taken_is_read_from_the_template(source: str, takes: bool) -> None:
    assert ChatTemplate(source, TOKENS, clock()).takes_tools is takes
