"""Templates that want to hang the server, fill its memory or get at Python: each ends soon, and with a refusal."""

import resource

import pytest

from headwater.clock import VirtualClock
from headwater.errors import InvalidRequest, ModelError
from headwater.frontend.preprocess.template import ChatTemplate, Jinja2Renderer
from headwater.frontend.preprocess.template_cage import MAX_STEPS

LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
BOMBS = {
    "loops": LOOP,
    "loops in a macro": "{% macro f() %}" + LOOP + "{% endmacro %}{{ f() }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "power": "{{ 10 ** (10 ** 7) }}",
    "power of powers": "{{ 9 ** 9 ** 9 ** 9 }}",
    "repetition": "{{ 'a' * (10 ** 9) }}",
    "repetition of a list": "{{ ([1] * (10 ** 9)) | length }}",
    "doubling": "{% set n = namespace(s='a' * 100) %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "plus": "{% set n = namespace(s='a' * 100) %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) | length }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) | length }}",
    "format": "{{ '%1000000000s' % 'x' }}",
    "format filter": "{{ '%1000000000s' | format('x') }}",
    "format with a star": "{{ '%*s' % (1000000000, 'x') }}",
    "format method": "{{ '{:>1000000000}'.format('x') }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "padding": "{{ 'x'.ljust(1000000000) }}",
    "zeros": "{{ 'x'.zfill(1000000000) }}",
    "tabs": "{{ '\\t'.expandtabs(1000000000) }}",
    "indent": "{{ 'x\\ny' | indent(1000000000) }}",
    "range": "{{ range(10 ** 9) | list | length }}",
}
ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ [].__class__.__base__.__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "builtins": "{{ self.__init__.__globals__.__builtins__ }}",
    "attribute filter": "{{ '' | attr('__class__') }}",
    "format string": "{{ '{0.__class__.__mro__}'.format('') }}",
    "mutation": "{{ messages.append(1) }}",
    "steps": "{{ headwater_tick__.__closure__ }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
}
MESSAGES = [{"role": "user", "content": "hi"}]


def outcome(source: str) -> str:
    try:
        renderer = Jinja2Renderer(source, lambda form: form)
        return renderer.render({"messages": MESSAGES})
    except Exception as error:  # noqa: BLE001 - whatever it is, it ended
        return f"refused: {type(error).__name__}"


@pytest.mark.parametrize("name", BOMBS)
def test_what_never_ends_or_fills_the_memory_is_refused(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = outcome(BOMBS[name])
    assert said.startswith("refused") or len(said) < 1000, said[:100]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000, "kilobytes"


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_leads_out_of_the_cage(name: str) -> None:
    said = outcome(ESCAPES[name])
    assert said.startswith("refused") or said.strip() in ("", "Undefined"), said[:200]


@pytest.mark.parametrize("name", ["power", "recursion", "replace", "indent", "zeros", "range", *ESCAPES])
def test_whichever_library_runs_it_the_template_is_refused_or_harmless(name: str) -> None:
    source = {**BOMBS, **ESCAPES}[name]
    try:
        template = ChatTemplate(source, {}, VirtualClock())
        text = template.render(MESSAGES)
    except (ModelError, InvalidRequest):
        return
    assert len(text) < 1000
    assert "class" not in text
    assert "root:" not in text


def test_loops_that_end_are_let_be() -> None:
    inner = "{% for j in range(300) %}{% if j == 299 %}{{ i % 10 }}{% endif %}{% endfor %}"
    assert len(outcome("{% for i in range(300) %}" + inner + "{% endfor %}")) == 300
    assert outcome("{{ 'a' ~ 1 ~ none ~ 'b' + 'c' * 3 }}") == "a1Nonebccc"
    assert outcome("{{ 'a-b'.replace('-', '+') }}{{ 'a-b' | replace('-', '') }}{{ 2 ** 10 }}") == "a+bab1024"
    assert outcome("{{ '%s-%d' % ('x', 5) }}{{ '{}-{:>2}'.format('y', 6) }}") == "x-5y- 6"
    assert MAX_STEPS > 300 * 300
