"""Every architecture in the folder against transformers, from files: a new one is tested by being there."""

import copy
import importlib
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common import config as configuration
from common.columns import pack_i32, unpack_i32
from common.errors import ConfigError
from common.kv_needs import needs
from common.protocol import RowStart, Sampling, StepPlan
from services.worker import compile as levels
from services.worker.kernels.packing.mx import decode_mxfp4, encode_mxfp4
from services.worker.kernels.registry import bind
from services.worker.model_engine import ModelEngine, facts_of
from services.worker.models import llama, mistral, qwen3
from services.worker.models.registry import Found, all_models, find_model, index
from services.worker.models.spec import SLIDING, Config
from services.worker.sampler import Sampler
from tests.services.worker.layers.test_decoder import run
from tests.services.worker.served import FLOAT, SHAPE, Served, Serving
from tests.services.worker.tiny import (
    VARIANTS,
    VOCABULARY,
    Tiny,
    config_values,
    every,
    load_decoder,
    make_reference,
)

LENGTHS = [2, 9, 23, 64]
NEW = 8
WINDOW = {"sliding_window": 24, "use_sliding_window": True}

TOLERANCE = 1e-4  # of logits between about -4 and 4, in float32


def tokens(count: int, seed: int) -> list[int]:
    """Without the last number, which may stand for an image."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(3, VOCABULARY - 1, (count,), generator=generator)]


PROMPTS = [tokens(length, length) for length in LENGTHS]


def is_greedy(tiny: Tiny, prompt: list[int], output: list[int]) -> bool:
    """Whether each token is the one that transformers finds likeliest behind all before it."""
    logits = tiny.logits([*prompt, *output[:-1]])
    return output == logits[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.fixture(scope="module")
def wanted(make_tiny: Callable[[str], Tiny]) -> Callable[[str], list[list[int]]]:
    """transformers' greedy tokens behind PROMPTS."""
    made: dict[str, list[list[int]]] = {}

    def make(name: str) -> list[list[int]]:
        if name not in made:
            outputs = make_tiny(name).driver().generate(PROMPTS, NEW)
            assert all(is_greedy(make_tiny(name), *pair) for pair in zip(PROMPTS, outputs, strict=True))
            made[name] = outputs
        return made[name]

    return make


@pytest.mark.parametrize("name", every())
def test_on_a_gpu_triton_has_every_op_of_a_model(make_tiny: Callable[[str], Tiny], name: str) -> None:
    """Then a start compiles by all cores, and a step is launched without torch's small kernels."""
    tiny = make_tiny(name)
    facts = facts_of(torch.device("cpu"), torch.bfloat16, tiny.decoder.spec, 16, torch.bfloat16)
    bindings = bind(("triton", "torch"), replace(facts, device="cuda", arch="sm_90"))
    load_decoder(tiny.folder, bindings=bindings)
    Sampler(bindings)
    others = {row.op for row in bindings.table if row.op in bindings.asked and row.provider != "triton"}
    assert others == set()


@pytest.mark.parametrize("name", every())
def test_logits_are_transformers_under_any_chunking(make_tiny: Callable[[str], Tiny], name: str) -> None:
    tiny, prompt = make_tiny(name), tokens(150, 1)
    expected = tiny.logits(prompt)
    assert expected.std() > 0.5, "a checkpoint whose logits are all alike would prove nothing"
    for chunks in ([150], [64, 63, 22, 1]):
        torch.testing.assert_close(run(tiny.decoder, prompt, chunks), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", every())
def test_rows_of_unlike_lengths_decode_beside_chunks_of_others(
    make_tiny: Callable[[str], Tiny], wanted: Callable[[str], list[list[int]]], name: str
) -> None:
    assert make_tiny(name).driver().generate(PROMPTS, NEW, 7) == wanted(name)


@pytest.mark.parametrize("name", all_models())
def test_a_preempted_row_goes_on_elsewhere(
    make_tiny: Callable[[str], Tiny], wanted: Callable[[str], list[list[int]]], name: str
) -> None:
    """Removed after 3 tokens, added again in other blocks with prompt and output, nothing computed."""
    driver, prompt = make_tiny(name).driver(), PROMPTS[2]
    size = len(prompt)
    output = driver.step([(0, 0, size, True)], added=[driver.start(0, prompt, range(5))])
    for position in range(size, size + 2):
        output += driver.step([(0, position, 1, True)])
    again = driver.start(2, prompt + output, range(20, 26), num_prompt=size)
    driver.step([(2, 0, 10, False)], removed=pack_i32([0]), added=[again])
    output += driver.step([(2, 10, size - 7, True)])
    for position in range(size + 3, size + NEW - 1):
        output += driver.step([(2, position, 1, True)])
    assert output == wanted(name)[2]


@pytest.mark.parametrize("name", all_models())
def test_a_prefix_hit_reads_the_other_rows_blocks(
    make_tiny: Callable[[str], Tiny], wanted: Callable[[str], list[list[int]]], name: str
) -> None:
    driver, prompt = make_tiny(name).driver(), PROMPTS[3]
    driver.step([(0, 0, 56, False)], added=[driver.start(0, prompt, range(9))])
    driver.step([(0, 56, 8, True)], copies=driver.copied(0, 9))  # what is left of a state is a copy
    hit = driver.start(1, prompt, [*range(7), 30, 31, 32], computed=56)
    output = driver.step([(0, 64, 1, True), (1, 56, 8, True)], added=[hit], copies=driver.copied(9, 1))[1:]
    for position in range(64, 64 + NEW - 1):
        output += driver.step([(1, position, 1, True)])
    assert output == wanted(name)[3]


@pytest.mark.parametrize("name", all_models())
def test_the_scheduler_serves_it_in_the_least_memory(
    make_tiny: Callable[[str], Tiny], wanted: Callable[[str], list[list[int]]], name: str
) -> None:
    """Pools that hold the longest sequence and hardly more; with windows less than all layers' pages of it."""
    decoder = make_tiny(name).decoder
    layout, size = decoder.layout(8, FLOAT, 16), SHAPE.block_tokens
    longest = max(LENGTHS) + NEW
    pools = [blocks + 1 for blocks in needs(layout.groups, len(layout.pools), longest, size)]
    whole = -(-longest // size) * len(layout.pages)
    slides = any(group.kind == "window" for group in layout.groups)
    assert not slides or pools[0] < whole, "freeing must be needed"
    served = Served(decoder, pools, configuration.Scheduler(max_rows=8, step_tokens=32, plans_in_flight=1), every=16)
    assert served.generate(PROMPTS, NEW) == wanted(name)
    assert served.core.metrics()["preemptions"] > 0 or not slides
    served = Served(decoder, pools, every=16)
    assert served.generate(PROMPTS, NEW) == wanted(name)
    assert served.generate(PROMPTS[::-1], NEW) == wanted(name)[::-1]
    roomy = Served(decoder, [5 * blocks for blocks in pools], every=16)
    assert roomy.generate(PROMPTS, NEW, n=2) == [output for output in wanted(name) for _ in range(2)]
    before = roomy.core.metrics()["cached_tokens"]
    assert roomy.generate(PROMPTS, NEW) == wanted(name)
    # a hit on states ends at a checkpoint, which the prompt's last tokens are beyond
    found = 48 if any(group.kind == "state" for group in layout.groups) else 56
    assert roomy.core.metrics()["cached_tokens"] >= before + 16 + found


def test_an_engine_gives_pages_back_and_says_so(
    make_tiny: Callable[[str], Tiny], wanted: Callable[[str], list[list[int]]]
) -> None:
    """With the kernels of this host, in a pool that cannot hold all layers' pages of the longest sequence."""
    folder = make_tiny("GptOssForCausalLM").folder
    settings = ["model.dtype=float32", "worker.device=cpu", "model.max_len=96", "kv.block_tokens=8", "kv.blocks=22"]
    engine = ModelEngine(configuration.load(None, [f"model.source={folder}", *settings]), lambda progress: None)
    assert [group.kind for group in engine.facts.groups] == ["full", "window", "window"]
    assert (engine.facts.num_blocks, engine.facts.pools) == (22, ()) and 22 < 3 * 96 // 8
    limits = configuration.Scheduler(max_rows=4, step_tokens=32)
    serving = Serving(engine.facts, lambda plan: engine.execute(plan).tokens(), limits)
    for _ in range(2):
        assert serving.generate(PROMPTS, NEW) == wanted("GptOssForCausalLM")
    assert serving.core.metrics()["preemptions"] > 0


# Their pieces are nearly those of Llama, DeepSeek V3, V3.2, Gemma 3's text model and Qwen3 with experts.
TRACED_LONG = (
    *("MistralForCausalLM", "Mistral3ForConditionalGeneration", "DeepseekV2ForCausalLM", "GlmMoeDsaForCausalLM"),
    *("Gemma3ForConditionalGeneration", "MixtralForCausalLM"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in TRACED_LONG)) for name in all_models()]
)
def test_its_pieces_can_be_traced_whole(make_tiny: Callable[[str], Tiny], name: str) -> None:
    """What levels 2 and 3 compile and capture: a break in a graph would be an error."""
    tiny, prompt = make_tiny(name), PROMPTS[2]
    decoder = load_decoder(tiny.folder, opaque=True)
    torch._dynamo.reset()
    decoder.pieces = levels.compile_pieces(levels.TRACED, decoder)
    torch.testing.assert_close(
        run(decoder, prompt, [20, 3]), run(tiny.decoder, prompt, [20, 3]), rtol=0, atol=TOLERANCE
    )


def test_experts_in_mxfp4_are_what_they_decode_to(make_tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    """A checkpoint as OpenAI publishes them, against transformers with the decoded numbers."""
    tiny = make_tiny("gpt_oss_64")
    reference, tensors = copy.deepcopy(tiny.reference), dict(tiny.tensors)
    for name, parameter in reference.named_parameters():
        if name.endswith("_proj") and ".experts." in name:
            packed, scales = encode_mxfp4(tensors.pop(name).transpose(1, 2))
            parameter.data = decode_mxfp4(packed, scales).transpose(1, 2)
            tensors[f"{name}_blocks"] = packed.view(*scales.shape, 16).contiguous()
            tensors[f"{name}_scales"] = scales.contiguous()
    (tmp_path / "config.json").write_text((tiny.folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    decoded, prompt = Tiny(reference, tmp_path, load_decoder(tmp_path)), PROMPTS[3]
    assert (decoded.logits(prompt) - tiny.logits(prompt)).abs().max() > 0.1
    torch.testing.assert_close(run(decoded.decoder, prompt, [64]), decoded.logits(prompt), rtol=0, atol=TOLERANCE)


def test_what_a_multimodal_checkpoint_has_besides_is_left_out_and_all_else_is_named(
    make_tiny: Callable[[str], Tiny], tmp_path: Path
) -> None:
    """Under the names of transformers 4 too; a layer for multi-token prediction goes the same way."""
    tiny, prompt = make_tiny("Gemma3ForConditionalGeneration"), PROMPTS[2]
    assert any("vision_tower" in name for name in tiny.tensors)
    (tmp_path / "config.json").write_text((tiny.folder / "config.json").read_text())
    old = {
        re.sub(r"^model\.language_model\.", "language_model.model.", name).removeprefix("model.")
        if "language_model" not in name[:9]
        else name: value
        for name, value in tiny.tensors.items()
    }
    save_file(old, tmp_path / "model.safetensors")
    wanted = run(tiny.decoder, prompt, [len(prompt)])
    assert torch.equal(run(load_decoder(tmp_path), prompt, [len(prompt)]), wanted)
    save_file(old | {"audio_tower.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r'no place for "audio_tower\.weight"'):
        load_decoder(tmp_path)
    glm = make_tiny("Glm4MoeForCausalLM")
    (tmp_path / "config.json").write_text((glm.folder / "config.json").read_text())
    extra = {f"model.layers.{n}.eh_proj.weight": torch.ones(1) for n in (3, 30)}
    save_file(glm.tensors | extra, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r'no place for "model\.layers\.30\.eh_proj\.weight"'):
        load_decoder(tmp_path)
    extra.popitem()
    save_file(glm.tensors | extra, tmp_path / "model.safetensors")
    assert torch.equal(run(load_decoder(tmp_path), prompt, [5]), run(glm.decoder, prompt, [5]))


MADE_UP = '''
"""A family that nobody has: Qwen3's norms on heads, a window in every layer, names of its own for the projections."""

from services.worker.models.qwen3 import NAMES
from services.worker.models.spec import ModelDef, read_decoder, read_windows


def read(config):
    return read_decoder(config, qk_norm=True, windows=read_windows(config))


MODEL = ModelDef(("MadeUpForCausalLM",), ("all of it",), read, NAMES, prefixes={"body.": "model.", "eyes.": None})
'''


def test_drill_a_made_up_model_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Added to the folder it is found, loaded, held against transformers by the tests above, and serves."""
    import transformers

    models: Any = importlib.import_module("services.worker.models")
    (tmp_path / "made_up.py").write_text(MADE_UP)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    theirs = type("MadeUpForCausalLM", (transformers.Qwen3ForCausalLM,), {})
    monkeypatch.setattr(transformers, "MadeUpForCausalLM", theirs, raising=False)
    monkeypatch.setitem(VARIANTS, "made up", ("MadeUpForCausalLM", {"layer_types": [SLIDING] * 3, **WINDOW}))
    all_models.cache_clear()
    try:
        folder = tmp_path_factory.mktemp("made-up")
        reference = make_reference("made up")
        tensors = {f"body.{k}".replace("body.model.", "body."): v for k, v in reference.state_dict().items()}
        tensors = {k.replace("body.lm_head", "lm_head"): v.contiguous() for k, v in tensors.items()}
        reference.save_pretrained(folder)
        save_file(tensors | {"eyes.weight": torch.ones(1)}, folder / "model.safetensors")
        tiny = Tiny(reference, folder, load_decoder(folder))
        test_logits_are_transformers_under_any_chunking(lambda name: tiny, "made up")
        settings = [f"model.source={folder}", "model.dtype=float32", "worker.device=cpu", "kv.blocks=20"]
        engine = ModelEngine(configuration.load(None, settings), lambda progress: None)
        assert engine.facts.architecture == "MadeUpForCausalLM"
        prompt = PROMPTS[2]
        row = RowStart(0, 1, pack_i32(prompt), len(prompt), 0, pack_i32(range(3)), Sampling(2, temperature=0.0))
        step = {"slots": [0], "positions": [0], "counts": [len(prompt)]}
        columns = {key: pack_i32(values) for key, values in step.items()}
        token = list(unpack_i32(engine.execute(StepPlan(1, added=[row], samples=b"\1", **columns)).tokens()))
        assert is_greedy(tiny, prompt, token)
    finally:
        all_models.cache_clear()
        sys.modules.pop("services.worker.models.made_up", None)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["made_up.py"], "files touched: one"


@pytest.mark.parametrize(
    ("architecture", "changes", "text"),
    [
        ("Qwen3MoeForCausalLM", {"num_local_experts": None}, "'num_local_experts' is missing"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9, but there are 8 experts"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, "'decoder_sparse_step' is 0"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 3}, "'mlp_only_layers' is 3, expected list"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": None}, "'moe_intermediate_size' is missing"),
        ("GptOssForCausalLM", {"swiglu_limit": 9.0}, "'swiglu_limit' is 9.0, supported: 7.0"),
        ("GptOssForCausalLM", {"layer_types": ["full_attention"]}, "'layer_types' has 1 entries for 3 layers"),
        ("GptOssForCausalLM", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention', supported: sliding"),
        ("GptOssForCausalLM", {"sliding_window": -1}, "'sliding_window' is -1"),
        ("GptOssForCausalLM", {"num_hidden_layers": 10**12, "layer_types": None}, "num_layers is 1000000000000"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
        ("Gemma3ForCausalLM", {"hidden_activation": "gelu"}, "'hidden_activation' is 'gelu'"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True"),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": -1}, "'query_pre_attn_scalar' is -1"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "'sliding_window_pattern' is 0"),
        ("Gemma3ForCausalLM", {"rope_parameters": None, "rope_local_base_freq": -1.0}, "'rope_theta' is -1.0"),
        ("Qwen3NextForCausalLM", {"layer_types": ["linear_attention"] * 3}, "'layer_types' has no full_attention"),
        ("Qwen3NextForCausalLM", {"layer_types": [SLIDING] * 3}, "'layer_types' has 'sliding_attention'"),
        ("Qwen3NextForCausalLM", {"layer_types": None, "full_attention_interval": 0}, "'full_attention_interval' is 0"),
        ("Qwen3NextForCausalLM", {"linear_num_value_heads": 6}, "6 value heads cannot share 4 key heads"),
        ("Qwen3NextForCausalLM", {"linear_conv_kernel_dim": 1}, "'linear_conv_kernel_dim' is 1"),
        ("Qwen3NextForCausalLM", {"shared_expert_intermediate_size": -1}, "'shared_expert_intermediate_size' is -1"),
        ("MiMoV2FlashForCausalLM", {"attention_value_scale": None}, "'attention_value_scale' is missing"),
        ("MiMoV2FlashForCausalLM", {"v_head_dim": 0}, "'v_head_dim' is 0"),
        ("MiMoV2FlashForCausalLM", {"swa_head_dim": 32}, "'swa_head_dim' is 32, supported: 24"),
        ("MiMoV2FlashForCausalLM", {"swa_num_key_value_heads": 3}, "8 query heads cannot share 3 KV heads"),
        ("MiMoV2FlashForCausalLM", {"add_full_attention_sink_bias": True}, "'add_full_attention_sink_bias' is True"),
        ("MiMoV2FlashForCausalLM", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types' is"),
        ("MiMoV2FlashForCausalLM", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, "1 of 3 groups of 8 experts"),
        ("Glm4MoeForCausalLM", {"n_group": 8}, "1 of 8 groups of 8 experts"),
        ("Glm4MoeForCausalLM", {"topk_group": 3}, "3 of 2 groups"),
        ("Glm4MoeForCausalLM", {"num_experts_per_tok": 5}, "more than the chosen groups have"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "'norm_topk_prob' is True, supported: False"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "'topk_method' is 'noaux_tc'"),
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "'topk_method' is 'greedy'"),
        ("DeepseekV3ForCausalLM", {"num_key_value_heads": 2}, "'num_key_value_heads' is 2, supported: 6"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 0}, "'kv_lora_rank' is 0"),
        ("DeepseekV3ForCausalLM", {"v_head_dim": 10**9}, "'v_head_dim' is 1000000000"),
        ("DeepseekV3ForCausalLM", {"q_lora_rank": -1}, "'q_lora_rank' is -1"),
        ("DeepseekV3ForCausalLM", {"partial_rotary_factor": 0.5, "rope_parameters": None}, "4 of the 8 numbers"),
        ("DeepseekV32ForCausalLM", {"index_head_dim": 4}, "'index_head_dim' is 4, of which 8 are to be rotated"),
        ("DeepseekV32ForCausalLM", {"index_topk": 0}, "16 index heads that choose 0 tokens"),
        ("DeepseekV32ForCausalLM", {"q_lora_rank": 0}, "'q_lora_rank' is 0"),
        ("DeepseekV32ForCausalLM", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types' has"),
        ("GlmMoeDsaForCausalLM", {"indexer_types": ["shared", "full", "full"]}, "of which the first is full"),
        ("GlmMoeDsaForCausalLM", {"indexer_types": None, "index_topk_pattern": "FSX"}, "'X'"),
        ("EgMlaForCausalLM", {"gate_embedding_dim": 0}, "'gate_embedding_dim' is 0"),
    ],
)
def test_what_cannot_run_is_refused_by_name(architecture: str, changes: dict[str, Any], text: str) -> None:
    values = config_values(architecture) | changes
    with pytest.raises(ValueError, match=text):
        all_models()[architecture].model.read(Config(values))


def test_configurations_of_the_years_before() -> None:
    """Keys that transformers 5 no longer writes."""
    gemma = {"hidden_size": 48, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2}
    old = {"rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 512}
    values = {"text_config": gemma | old | {"hidden_activation": "gelu_pytorch_tanh"}, "vision_config": {}}
    spec = all_models()["Gemma3ForConditionalGeneration"].model.read(Config(values))
    assert spec.windows == (512, 512, 512, 512, 512, 0, 512) and spec.tie_embeddings and spec.vocab_size == 262_208
    assert spec.local_rope is not None and (spec.local_rope.theta, spec.local_rope.kind) == (1e4, "default")
    assert (spec.rope.theta, spec.rope.kind, spec.head_dim) == (1e6, "linear", 256)
    qwen = config_values("Qwen2ForCausalLM") | {"layer_types": None, "max_window_layers": 1}
    assert all_models()["Qwen2ForCausalLM"].model.read(Config(qwen)).windows == (0, 24, 24)
    assert all_models()["Qwen2ForCausalLM"].model.read(Config(qwen | {"use_sliding_window": None})).windows == ()


def test_published_configurations_of_latent_attention() -> None:
    """Kimi-K2's numbers under its own model_type; V2-Lite's without a latent of the query; GLM-5's schedules."""
    yarn = {"type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0}
    kimi: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "ep_size": 1,
    }
    kimi |= {"num_attention_heads": 64, "num_key_value_heads": 64, "num_hidden_layers": 61, "vocab_size": 163_840}
    kimi |= {"intermediate_size": 18_432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_group": 1}
    kimi |= {"topk_group": 1, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    kimi |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    kimi |= {"routed_scaling_factor": 2.827, "norm_topk_prob": True, "max_position_embeddings": 131_072}
    kimi |= {"rope_theta": 50_000.0, "rope_scaling": yarn | {"original_max_position_embeddings": 4096}}
    kimi |= {"moe_layer_freq": 1, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    spec = find_model(kimi["architectures"])[1].read(Config(kimi))
    assert spec.latent is not None and (spec.latent.row, spec.head_dim, spec.rope.rotary_dim) == (576, 192, 64)
    assert spec.moe is not None and spec.moe.grouped is not None and spec.moe.dense_layers == (0,)
    assert (spec.moe.num_experts, spec.moe.grouped.num_groups, spec.moe.grouped.scale) == (384, 1, 2.827)
    assert spec.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2)
    lite = kimi | {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "topk_method": "greedy"}
    lite |= {"scoring_func": "softmax", "norm_topk_prob": False, "n_routed_experts": 64}
    spec = all_models()["DeepseekV2ForCausalLM"].model.read(Config(lite))
    assert spec.latent is not None and spec.latent.query_rank == 0
    assert spec.moe is not None and spec.moe.grouped is not None and spec.moe.grouped.softmax
    glm = config_values("GlmMoeDsaForCausalLM") | {"num_hidden_layers": 6, "indexer_types": None}
    glm |= {"mlp_layer_types": None}
    for keys, wanted in (
        ({"index_topk_pattern": "FSSFSF"}, "FSSFSF"),
        ({"index_topk_freq": 2}, "FFSFSF"),
        ({"index_topk_freq": 1}, ""),
    ):
        latent = all_models()["GlmMoeDsaForCausalLM"].model.read(Config(glm | keys)).latent
        assert latent is not None and latent.indexer is not None
        assert "".join("FS"[shared] for shared in latent.indexer.shared) == wanted


def test_the_document_lists_every_file() -> None:
    files: dict[str, list[str]] = {}
    for name, found in all_models().items():
        files.setdefault(found.file, []).append(name)
    rows = [
        f"| `{file}` | {', '.join(names)} | {'; '.join(all_models()[names[0]].model.features)} |"
        for file, names in sorted(files.items())
    ]
    document = Path(__file__).parents[4].joinpath("docs", "models.md").read_text()
    table = "| file | architectures | features |\n|---|---|---|\n" + "\n".join(rows) + "\n\n"
    assert table in document, f"docs/models.md needs:\n{table}"


def test_finds_every_file_of_the_folder() -> None:
    found = all_models()
    assert found["LlamaForCausalLM"] == Found("llama.py", llama.MODEL)
    assert (
        found["MistralForCausalLM"] == found["Mistral3ForConditionalGeneration"] == Found("mistral.py", mistral.MODEL)
    )
    assert found["Qwen3ForCausalLM"].file == "qwen3.py" and found["Qwen2ForCausalLM"].file == "qwen2.py"


def test_first_known_architecture_counts() -> None:
    assert find_model(["Unheard", "Qwen3ForCausalLM"]) == ("Qwen3ForCausalLM", qwen3.MODEL)


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Unheard is not supported; supported: .*LlamaForCausalLM, .*Mistral"):
        find_model(["Unheard"])
    with pytest.raises(ValueError, match=r"\(none\)"):
        find_model([])


def test_an_architecture_declared_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is declared in a\.py and in b\.py"):
        index([Found("a.py", llama.MODEL), Found("b.py", llama.MODEL)])
