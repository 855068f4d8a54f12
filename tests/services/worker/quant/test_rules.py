import pytest

from common.errors import ConfigError
from services.worker.quant.rules import Rule, Rules, Settings, named
from services.worker.quant.scheme import ROW, Numbers, Scheme

SOME, OTHER = (Scheme(name, Numbers("fp8", ROW)) for name in ("some", "other"))


@pytest.mark.parametrize(
    ("pattern", "how", "yes", "no"),
    [
        ("lm_head", "name", "lm_head", "lm_head2"),
        ("mlp.gate", "name", "model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj"),
        ("model.layers.3", "name", "model.layers.3.mlp.up_proj", "model.layers.30.mlp.up_proj"),
        (".*gate$", "regex", "model.mlp.gate", "model.mlp.gate_proj"),
        ("*.gate", "glob", "model.mlp.gate", "model.mlp.gate_proj"),
        ("lm_head", "glob", "lm_head", "model.lm_head"),
        (r"model\..*gate", "weight", "model.mlp.gate", "model.mlp.gate_proj"),
        (r".*gate\.weight", "weight", "model.mlp.gate", "model.mlp.gate_proj"),
        ("gate", "within", "model.mlp.gate_proj", "model.mlp.up_proj"),
    ],
)
def test_patterns(pattern: str, how: str, yes: str, no: str) -> None:
    rule = Rule(pattern, how, None)
    assert rule.matches(yes) and not rule.matches(no)


def test_the_first_rule_counts() -> None:
    rules = Rules("tool", SOME, [*named(["a", "re:b.*"]), *named(["*c"], "glob", OTHER), *named(["xc"], "glob")])
    found = {module: rules.scheme_of(module) for module in ("a", "bc", "xc", "d")}
    assert found == {"a": None, "bc": None, "xc": OTHER, "d": SOME}
    assert rules.schemes == [OTHER, SOME] and Rules("tool").schemes == []


def test_settings_are_read_by_type_and_to_the_last() -> None:
    settings = Settings({"bits": 4, "on": None, "table": {"x": 1}, "names": ["a"], "odd": 1}, "config.json: q")
    assert (settings.get(int, "bits"), settings.get(bool, "on", True), settings.names("names")) == (4, True, ["a"])
    table = settings.table("table")
    assert table is not None and table.get(int, "x") == 1 and settings.table("none") is None
    settings.finish("odd")
    with pytest.raises(ConfigError, match=r"^config.json: q: 'odd' is not known: 1$"):
        settings.finish()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: s.get(int, "missing"), "'missing' is missing"),
        (lambda s: s.get(str, "bits"), "'bits' is 4, expected str"),
        (lambda s: s.get(int, "flag"), "'flag' is True, expected int"),
        (lambda s: s.require("bits", 8, 2), "'bits' is 4, supported: 8, 2"),
        (lambda s: s.require("bits"), "'bits' is 4, supported: none"),
        (lambda s: s.empty("bits"), "'bits' is 4, which is not supported"),
        (lambda s: s.names("list"), "'list' lists 3, expected names"),
        (lambda s: s.names("bad"), "no regular expression"),
        (lambda s: s.tables("tables"), "'a' is 5, expected a table"),
        (lambda s: s.tables("nulls"), "'a' is None, expected a table"),
    ],
)
def test_what_is_wrong_is_named(call: object, text: str) -> None:
    values = {"bits": 4, "flag": True, "list": [3], "bad": ["re:("], "tables": {"a": 5}, "nulls": {"a": None}}
    with pytest.raises(ConfigError, match=text):
        call(Settings(values, "config.json"))  # type: ignore[operator]
