from services.worker.models.mimo_v2_flash import NAMES

MTP = NAMES.mtp
assert MTP is not None


def test_heads_are_counted_by_their_tensors() -> None:
    names = [f"model.mtp.layers.{head}.eh_proj.weight" for head in (0, 1, 2, 10)]
    assert MTP.heads(names) == 3, "those without a gap"
    assert MTP.heads(["model.layers.0.mlp.gate.weight"]) == 1, "what is missing is the loader's matter"


def test_names_of_each_head_and_of_those_left_out() -> None:
    """In an order in which the first that fits is meant."""
    found = MTP.prefixes(48, 2)

    def served(name: str) -> str | None:
        prefix = next(prefix for prefix in found if name.startswith(prefix))
        ours = found[prefix]
        return ours and ours + name.removeprefix(prefix)

    assert served("model.mtp.layers.1.enorm.weight") == "model.layers.49.enorm.weight"
    assert served("model.mtp.layers.0.pre_mlp_layernorm.weight") == "model.layers.48.post_attention_layernorm.weight"
    assert served("model.mtp.layers.2.enorm.weight") is None and served("model.mtp.layers.10.enorm.weight") is None
