"""What models/spec.py has for multi-token prediction; declared by models/*.py."""

from collections.abc import Mapping
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
    stored: Mapping[str, str | None] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()  # what is the model's own once more: embedding and head
