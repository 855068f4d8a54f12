"""What models/spec.py has for multi-token prediction; declared by models/*.py."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MtpNames:
    """Checkpoint names of what a layer for multi-token prediction has besides a decoder layer's. `{i}` is the layer."""

    embed_norm: str
    hidden_norm: str
    project: str  # [N, 2N], of the token's embedding and the hidden state
    final_norm: str  # before the head
    hidden_first: bool = False  # in the projection's input
    # Prefixes of checkpoint names, where the layer is not the one behind the last: what is meant, None: not served.
    # With `{h}` there may be several heads, of which head h looks h + 1 tokens further from the model's own states.
    stored: Mapping[str, str | None] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()  # what is the model's own once more: embedding and head

    def heads(self, names: Iterable[str]) -> int:
        """How many a checkpoint with tensors of these names has; 1 also where none is found, for its error."""
        several = [prefix for prefix in self.stored if "{h}" in prefix]
        names, count = list(names), 0
        while any(name.startswith(prefix.format(h=count)) for prefix in several for name in names):
            count += 1
        return max(count, 1)

    def prefixes(self, first: int, heads: int) -> dict[str, str | None]:
        """`stored` of so many heads, whose layers begin at `first`."""
        return {
            prefix.format(h=head): ours and ours.format(i=first + head)
            for prefix, ours in self.stored.items()
            for head in range(heads if "{h}" in prefix else 1)
        }
