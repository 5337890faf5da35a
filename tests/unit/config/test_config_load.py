import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headwater.config.fields import Field, fields_of, value_of
from headwater.config.load import LoadedConfig, load_config
from headwater.config.schema import ServeConfig
from headwater.config.show import json_schema, reference_markdown, show_json, show_text
from headwater.config.values import parse_value, spell
from headwater.errors import ConfigError

FIELDS = fields_of()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "graph.yaml"
    path.write_text(text)
    return path


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(*args, **kwargs)
    return f"{raised.value} | {raised.value.hint}"


def test_nothing_given_is_the_schema_with_default_origins() -> None:
    loaded = load_config()
    assert loaded.config == ServeConfig()
    assert {str(origin) for origin in loaded.origins.values()} == {"default"}


def test_each_layer_beats_the_one_before(tmp_path: Path) -> None:
    file = write(tmp_path, "workers: 2\nfrontend:\n  port: 1\n  max_body: 2MiB\nengine:\n  max_num_seqs: 8\n")
    environ = {"HEADWATER_PORT": "2", "HEADWATER_MAX_NUM_SEQS": "16", "PORT": "7", "OTHER": "x"}
    loaded = load_config({"port": "3"}, environ, file)
    assert loaded.config.frontend.port == 3
    assert loaded.config.engine.max_num_seqs == 16
    assert loaded.config.frontend.max_body == 2 * 1024**2
    assert str(loaded.origins["frontend.port"]) == "flag --port"
    assert str(loaded.origins["engine.max_num_seqs"]) == "environment HEADWATER_MAX_NUM_SEQS"
    assert str(loaded.origins["workers"]) == f"file {file}:1"
    assert str(loaded.origins["frontend.max_body"]) == f"file {file}:4"


def test_the_file_can_be_named_by_the_environment_and_a_flag_beats_it(tmp_path: Path) -> None:
    file = write(tmp_path, "workers: 3")
    other = tmp_path / "other.yaml"
    other.write_text("workers: 4")
    assert load_config(environ={"HEADWATER_CONFIG": str(file)}).config.workers == 3
    assert load_config(environ={"HEADWATER_CONFIG": str(file)}, file=other).config.workers == 4


SCALARS: dict[str, st.SearchStrategy[str]] = {
    "bool": st.sampled_from(["true", "false"]),
    "int": st.integers(1, 65535).map(str),
    "float": st.integers(1, 10_000).map(lambda n: str(n / 8)),
    "str": st.text("abcdefghij/.:-", min_size=1, max_size=12).filter(lambda text: text != "none"),
}


def spelled(field: Field) -> st.SearchStrategy[str]:
    if field.choices:
        return st.sampled_from(field.choices)
    if field.kind == "float" and field.maximum is not None:
        return st.integers(0, int(field.maximum * 8)).map(lambda n: str(n / 8))
    return SCALARS[field.kind]


@st.composite
def layers(draw: st.DrawFn) -> dict[str, tuple[str | None, str | None, str | None]]:
    """For some keys, a spelling in the file, the environment and the flags, or none."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=8))
    maybe = {name: st.none() | spelled(FIELDS[name]) for name in names}
    return {name: (draw(s), draw(s), draw(s)) for name, s in maybe.items()}


@given(layers())
def test_the_last_layer_that_speaks_wins_for_every_key(
    tmp_path_factory: pytest.TempPathFactory, given_layers: dict[str, tuple[str | None, str | None, str | None]]
) -> None:
    tree: dict[str, Any] = {}
    for name, (in_file, _, _) in given_layers.items():
        if in_file is not None:
            section = FIELDS[name].section
            (tree.setdefault(section, {}) if section else tree)[name] = in_file
    file = write(tmp_path_factory.mktemp("layers"), yaml.safe_dump(tree))
    environ = {FIELDS[name].variable: env for name, (_, env, _) in given_layers.items() if env is not None}
    flags = {name: flag for name, (_, _, flag) in given_layers.items() if flag is not None}
    loaded = load_config(flags, environ, file)
    for name, field in FIELDS.items():
        in_file, env, flag = given_layers.get(name, (None, None, None))
        winner = next((text for text in (flag, env, in_file) if text is not None), None)
        wanted = field.default if winner is None else parse_value(field, winner)
        assert value_of(loaded.config, field) == wanted
        layer = "flag" if flag else "environment" if env else "file" if in_file else "default"
        assert loaded.origins[field.key].layer == layer


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("engine:\n  max_num_seq: 4", "graph.yaml:2: unknown key engine.max_num_seq | did you mean max_num_seqs?"),
        ("engine:\n  max-num-seqs: 4", "did you mean max_num_seqs?"),
        ("engin:\n  model: x", "unknown key engin.model | model belongs under `engine:`"),
        ("prot: 1", "graph.yaml:1: unknown key prot | did you mean port, under `frontend:`?"),
        ("frontnd:", "did you mean frontend?"),
        ("frontend:\n  workers: 1", "workers belongs at the top level"),
        ("port: 1", "port belongs under `frontend:`"),
        ("frontend:\n  port: 1\n  port: 2", "graph.yaml:3: frontend.port is given twice (first on line 2)"),
        ("frontend: 5", "frontend is a section"),
        ("- a\n- b", "graph.yaml:1: the file must be a mapping"),
        ("workers: [1, [2]]", "plain value or a list"),
        ("frontend:\n  port: {a: 1}", "port takes a plain value"),
        ("a: b: c", "graph.yaml:1: not valid YAML"),
        ("workers: 1\n---\nworkers: 2", "not valid YAML"),
        ("a: \x01", "not valid YAML"),
        ("frontend:\n  port: 99999", "graph.yaml:2: frontend.port = 99999: expected a whole number from 0 to 65535"),
        ("frontend:\n  port: '80x'", "from 0 to 65535: '80x' is not a whole number"),
        ("frontend:\n  port: yes", "frontend.port = True: expected a whole number"),
        ("frontend:\n  port: 8000.5", "expected a whole number"),
        ("frontend:\n  strict: 1", "expected true or false"),
        ("frontend:\n  api_key: [123456]", "frontend.api_key: expected text: YAML reads it as int; put it in quotes"),
        ("engine:\n  dtype: flaot32", "expected one of auto, bfloat16, float16, float32 | did you mean float32?"),
        ("engine:\n  block_size:", "expected a whole number of at least 1, such as 4096 or 32K, not nothing"),
        ("workers: 0", "workers = 0: expected a whole number of at least 1"),
        ("engine:\n  mocker_speedup: .inf", "expected a number"),
    ],
)
def test_bad_files_are_refused_with_place_and_advice(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(file=write(tmp_path, text))


@pytest.mark.parametrize("text", ["", "# nothing\n", "engine:\n", "engine: {}\nfrontend:\n"])
def test_files_that_say_nothing_are_fine(tmp_path: Path, text: str) -> None:
    assert load_config(file=write(tmp_path, text)).config == ServeConfig()


def test_unreadable_files(tmp_path: Path) -> None:
    assert "cannot read" in refused(file=tmp_path / "missing.yaml")
    assert "cannot read" in refused(file=tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    assert "not UTF-8" in refused(file=tmp_path / "latin.yaml")
    (tmp_path / "deep.yaml").write_bytes(b"[" * 20_000)
    assert "nested too deeply" in refused(file=tmp_path / "deep.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (1024 * 1024 + 1))
    assert "no configuration file" in refused(file=tmp_path / "large.yaml")


def test_yaml_tags_construct_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, "engine:\n  model: !!python/object/apply:os.system [echo]\n")
    assert "expected text" in refused(file=file)
    file = write(tmp_path, "engine:\n  model: !!python/name:os.system text\n")
    assert load_config(file=file).config.engine.model == "text"


def test_unknown_variables_are_refused_with_the_nearest() -> None:
    assert "did you mean HEADWATER_MAX_NUM_SEQS?" in refused(environ={"HEADWATER_MAX_NUM_SEQ": "1"})
    assert "HEADWATER_PORT: frontend.port = 'http': expected" in refused(environ={"HEADWATER_PORT": "http"})


def test_kubernetes_service_links_are_not_configuration() -> None:
    links = {
        "HEADWATER_SERVICE_HOST": "10.0.0.1",
        "HEADWATER_SERVICE_PORT": "8000",
        "HEADWATER_SERVICE_PORT_HTTP": "8000",
        "HEADWATER_PORT": "tcp://10.0.0.1:8000",
        "HEADWATER_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "HEADWATER_PORT_8000_TCP_ADDR": "10.0.0.1",
        "HEADWATER_FRONTEND_PORT": "tcp://10.0.0.1:8000",
    }
    assert load_config(environ=links).config == ServeConfig()


def test_an_empty_variable_is_not_set() -> None:
    assert load_config(environ={"HEADWATER_PORT": "", "HEADWATER_NOT_OURS": " "}).config == ServeConfig()


def test_lists_come_by_comma_by_repetition_and_from_yaml(tmp_path: Path) -> None:
    file = write(tmp_path, "engine:\n  served_model_name: [a, b]\nfrontend:\n  api_key: 'x,y'\n")
    config = load_config({"cors": ["p,q", "r"]}, {}, file).config
    assert config.engine.served_model_name == ("a", "b")
    assert config.frontend.api_key == ("x", "y")
    assert config.frontend.cors == ("p", "q", "r")


def test_none_takes_a_value_back(tmp_path: Path) -> None:
    file = write(tmp_path, "engine:\n  max_model_len: 4096\n  model: m\n")
    config = load_config({"max_model_len": "none"}, {"HEADWATER_MODEL": "None"}, file).config
    assert (config.engine.max_model_len, config.engine.model) == (None, None)


def test_secrets_can_stay_in_a_file_and_are_never_shown(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-secret\n\n second-secret \n")
    loaded = load_config({"api_key": [f"@{keys}", "third-secret"]})
    assert loaded.config.frontend.api_key == ("first-secret", "second-secret", "third-secret")
    shown = show_text(loaded, origin=True) + show_json(loaded, origin=True) + show_json(loaded)
    assert "secret" not in shown
    assert "cannot read" in refused({"api_key": "@/nowhere/keys"})
    keys.write_text("\n")
    assert "must hold" in refused({"api_key": f"@{keys}"})


def test_a_redacted_secret_is_not_taken_for_one(tmp_path: Path) -> None:
    text = show_text(load_config({"api_key": "abc"}))
    assert "redacted" in refused(file=write(tmp_path, text))


def all_non_default() -> LoadedConfig:
    other = {"bool": "false", "int": "7", "float": "0.25", "str": "other"}
    flags = {
        name: "true" if field.default is False else field.choices[-1] if field.choices else other[field.kind]
        for name, field in FIELDS.items()
        if not field.secret
    }
    return load_config(flags)


def test_what_show_prints_can_be_fed_back(tmp_path: Path) -> None:
    loaded = all_non_default()
    assert load_config(file=write(tmp_path, show_text(loaded, origin=True))).config == loaded.config


def test_json_show_carries_every_key_with_its_origin() -> None:
    shown = json.loads(show_json(all_non_default(), origin=True))
    assert set(shown) == {field.key for field in FIELDS.values()}
    assert shown["frontend.port"] == {"value": 7, "origin": {"layer": "flag", "detail": "--port"}}


def test_every_key_has_three_spellings_and_words() -> None:
    table = reference_markdown()
    for field in FIELDS.values():
        assert field.doc, field.key
        assert f"`{field.flag}" in table
        assert f"`{field.variable}`" in table


def test_defaults_survive_being_spelled() -> None:
    for field in FIELDS.values():
        if not field.secret:
            assert parse_value(field, spell(field, field.default)) == field.default


def test_the_schema_describes_every_key() -> None:
    schema = json.loads(json_schema())
    properties = schema["$defs"]["EngineConfig"]["properties"]
    assert set(properties) == {field.name for field in FIELDS.values() if field.section == "engine"}
    assert {"type": "string"} in properties["max_model_len"]["anyOf"]
    assert properties["block_size"]["type"] == ["integer", "string"]
    assert schema["$defs"]["EngineConfig"]["additionalProperties"] is False
