import pytest

from services.worker.models import llama, qwen3
from services.worker.models.registry import Found, all_models, find_model, index


def test_finds_every_file_of_the_folder() -> None:
    found = all_models()
    assert found["LlamaForCausalLM"] == found["MistralForCausalLM"] == Found("llama.py", llama.MODEL)
    assert found["Qwen3ForCausalLM"].file == "qwen3.py" and found["Qwen2ForCausalLM"].file == "qwen2.py"


def test_first_known_architecture_counts() -> None:
    assert find_model(["Unheard", "Qwen3ForCausalLM"]) == ("Qwen3ForCausalLM", qwen3.MODEL)


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Unheard is not supported; supported: LlamaForCausalLM, Mistral"):
        find_model(["Unheard"])
    with pytest.raises(ValueError, match=r"\(none\)"):
        find_model([])


def test_an_architecture_declared_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is declared in a\.py and in b\.py"):
        index([Found("a.py", llama.MODEL), Found("b.py", llama.MODEL)])
