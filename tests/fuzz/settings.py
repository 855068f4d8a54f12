# ruff: noqa: PT017 (what an error says is part of the case)
"""What operators write: TOML files, --set values, key files, keys in the environment, Authorization headers.

Each is a valid configuration or a ConfigError; no header is more than an unknown key.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from common import api_keys
from common import config as configuration
from common.api_keys import Key
from common.config import Config
from common.errors import ConfigError
from services.api.guard import bearer
from services.api.keys import Keyring
from tests.fuzz import mutate

VALUES = (
    *(
        "0",
        "1",
        "-1",
        "1e999",
        "-inf",
        "nan",
        "9" * 400,
        "0x10",
        "1_000",
        "true",
        '""',
        '"x"',
        "[]",
        "[1]",
        '["a"]',
        "{}",
    ),
    *(
        "{a = 1}",
        "{a.b = 1}",
        "1979-05-27",
        "07:32:00",
        "'''x",
        '"\\ud800"',
        '"\\u0000"',
        "\0",
        "=",
        "\n",
        "# c",
        "\ud800",
    ),
    *(
        "[[[[[[[[[[]]]]]]]]]]",
        "[" * 3000,
        "{a = " * 500,
        "é",
        "float32",
        "auto",
        "bundled",
        "inf",
        "..",
        "[model]",
        "1\n[a]",
    ),
)
KEYS = (
    "",
    ".",
    "..",
    "a",
    "model",
    "model.",
    ".model",
    "model..name",
    "model.name.x",
    "é.é",
    "\0",
    "x" * 5000,
    "a b",
    '"a"',
)


def a_setting(random: Random) -> str:
    key = random.choice((*KEYS, *configuration.keys(), *configuration.keys(), *configuration.keys()))
    if random.random() < 0.1:
        key = mutate.frame(random, key.encode("utf-8", "surrogatepass")).decode("latin-1")
    return key + random.choice(("=", "=", "=", "=", "", "==", " = ")) + random.choice(VALUES)


def a_file(random: Random) -> bytes:
    lines = []
    for _ in range(random.choice((0, 1, 3, 9))):
        lines.append(random.choice(("[model]", "[kv]", "[a]", "[[api]]", "[", "[model.a]", "[]", a_setting(random))))
    lines.insert(0, configuration.render(Config()) if random.random() < 0.4 else "")
    encoded = "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutate.frame(random, encoded) if random.random() < 0.4 else encoded


def a_key_file(random: Random) -> bytes:
    keys = [api_keys.make(f"name-{place}", api_keys.make_secret(), 3, 9) for place in range(random.randrange(3))]
    trees: list[Any] = [msgspec.to_builtins(key) for key in keys]
    for _ in range(random.choice((0, 1, 2))):
        trees = mutate.tree(random, trees)
        trees = trees if isinstance(trees, list) else [trees]
    encoded = b"\n".join(json.dumps(tree).encode() for tree in trees)
    odd = (b"[" * 99_999, b"\xff\xfe", b"\0", b'{"name": NaN}', b"null\n\n{}", b'{"name": "\\ud800"}', b"9" * 9999)
    return random.choice((encoded, encoded, mutate.frame(random, encoded), random.choice(odd)))


def a_header(random: Random) -> list[tuple[bytes, bytes]]:
    words = (
        b"Bearer",
        b"bearer",
        b"BEARER ",
        b"Basic",
        b"\xff",
        b" ",
        b"\t",
        b"x" * 9000,
        b"vl-",
        b"",
        b"\0",
        b"\xc3\xa9",
    )
    values = [b" ".join(random.choices(words, k=random.randrange(5))) for _ in range(random.choice((0, 1, 1, 1, 2)))]
    return [(b"authorization", value) for value in values]


def usable(config: Config) -> None:
    """What every process does with a configuration: its settings can be written down and read again."""
    assert configuration.fingerprint(config)
    with tempfile.NamedTemporaryFile("w", suffix=".toml", errors="surrogatepass") as file:
        file.write(configuration.render(config))
        file.flush()
        assert configuration.load(file.name) == config
    assert str(config.run_dir)


def one_case(random: Random, folder: Path) -> None:
    path = folder / "settings.toml"
    path.write_bytes(a_file(random))
    settings = [a_setting(random) for _ in range(random.randrange(4))]
    try:
        usable(configuration.load(path if random.random() < 0.6 else None, settings))
    except ConfigError as error:
        assert str(error) and len(str(error)) < 12_000
    keys = folder / "keys"
    keys.write_bytes(a_key_file(random))
    environment = " ".join(random.choices((*VALUES, *KEYS, "a=vl-x", "vl-y", ","), k=random.randrange(4)))
    found: list[Key] = []
    try:
        found = api_keys.read(keys) + api_keys.given(environment)
        ring = Keyring(str(keys), environment)
    except ConfigError:
        return
    assert len(found) < 20
    for _ in range(4):
        secret = bearer(a_header(random))
        known = [key for key in found if api_keys.digest(secret, bytes.fromhex(key.salt)).hex() == key.hash]
        account = ring.find(secret)
        assert (account is None) == (not known), secret


def fuzz(budget: int, first: int, advance: Callable[[], None]) -> None:
    """`budget` cases of each kind."""
    random = Random(first)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(budget):
            case = random.getrandbits(63)
            try:
                one_case(Random(case), Path(folder))
            except Exception as error:
                error.add_note(f"tests.fuzz.settings.one_case(Random({case}), folder)")
                raise
            advance()
