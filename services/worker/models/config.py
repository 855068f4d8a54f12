"""Typed reading of a checkpoint's config.json, whose values are not to be trusted. Called by models/*.py."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
REQUIRED = object()
# Far more than any model has, and little enough for what follows from it.
MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_layers": 10_000,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "head_dim": 1 << 16,
    "max_position": 1 << 28,
}


class Config:
    """Typed reading of a checkpoint's config dict; a value we cannot honour stops with its name."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def get(self, kind: type[T], key: str, default: object = REQUIRED) -> T:
        """The value of `key` as `kind`; absent or null gives `default`. Raises ValueError if missing or mistyped."""
        value = self._values.get(key)
        if value is None:
            if default is REQUIRED:
                raise ValueError(f"config: {key!r} is missing")
            value = default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"config: {key!r} is {value!r}, expected {kind.__name__}")
        return value

    def mapping(self, key: str) -> Mapping[str, object]:
        """The sub-table `key`, empty if absent or null."""
        return self.get(dict, key, {})

    def over(self, defaults: Mapping[str, object]) -> "Config":
        """With what transformers takes for keys that are absent or null, where a family's configurations rely on it."""
        return Config({**defaults, **{key: value for key, value in self._values.items() if value is not None}})

    def changed(self, values: Mapping[str, object]) -> "Config":
        """With these in place of what it has."""
        return Config({**self._values, **values})

    @property
    def text(self) -> "Config":
        """The part that describes the language model, of a model that has other parts as well; else the whole.

        Whether the head is the embedding may be said outside of that part, and then counts.
        """
        part, key = self.mapping("text_config"), "tie_word_embeddings"
        return Config({**part, key: self._values.get(key, part.get(key))} if part else self._values)

    @property
    def num_layers(self) -> int:
        """Raises ValueError for a number that no model has, before anybody makes a list as long."""
        number = self.get(int, "num_hidden_layers")
        if not 1 <= number <= MOST["num_layers"]:
            raise ValueError(f"config: num_layers is {number}, not between 1 and {MOST['num_layers']}")
        return number

    def require(self, key: str, allowed: Sequence[object]) -> None:
        """Raises ValueError unless `key` is absent, null or one of `allowed`."""
        value = self._values.get(key)
        if value is not None and value not in allowed:
            raise ValueError(f"config: {key!r} is {value!r}, supported: {', '.join(map(repr, allowed)) or 'none'}")
