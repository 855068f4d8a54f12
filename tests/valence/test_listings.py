from common.config import Worker
from services.worker.kernels.registry import all_ops
from valence import listings


def test_models_name_their_file_and_features() -> None:
    by_name = {row["architecture"]: row for row in listings.models()}
    assert by_name["LlamaForCausalLM"]["file"] == "llama.py"
    assert by_name["Qwen3ForCausalLM"]["features"]
    assert all(row.keys() == {"architecture", "file", "features"} for row in by_name.values())


def test_ops_say_what_runs_and_why() -> None:
    rows = listings.ops(Worker(device="cpu", kernels=("torch",)))
    assert [row["op"] for row in rows] == sorted(all_ops())
    assert all(row.keys() == {"op", "provider", "reason"} for row in rows)
    assert {row["provider"] for row in rows} == {"torch"}


def test_facts_of_the_cpu() -> None:
    assert listings.facts("cpu").device == "cpu"
