"""Whole models through the provider, on a fake AITER: the tokens of torch, and what of AITER was called for them."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from common.columns import pack_i32
from services.worker.compile import INDUCTOR, compile_pieces
from services.worker.kernels.layout import SHUFFLED, TOKENS
from services.worker.kernels.registry import Bindings, Facts, all_ops, bind, find_impls
from tests.services.worker.kernels.impl.aiter.fake import NEW, OLD, Fake, fp8_of
from tests.services.worker.kernels.impl.aiter.models import (
    BLOCK_TOKENS,
    COMMON,
    CONFIGS,
    generate,
    make_model,
    serve,
    start,
)

TORCH = bind(("torch",), Facts("cpu"))
PROMPTS = [list(range(3, 3 + length)) for length in (40, 1, 17, 33)]
DENSE = {"rms_norm", "add_rms_norm", "linear", "add_linear", "norm_linear", "norm_gated_linear", "silu_and_mul"}
DENSE |= {"gelu_and_mul", "rope", "kv_write", "rope_kv_write", "paged_attention"}


def bound(architecture: str, arch: str = "gfx942", fp8: bool = False, opaque: bool = False) -> Bindings:
    """As on a host with that GPU, but for the kernels that only a GPU can run."""
    config = {**COMMON, **CONFIGS[architecture]}
    shapes = {name: config[name] for name in ("head_dim", "hidden_size")} | {"block_tokens": BLOCK_TOKENS}
    shapes |= {"num_heads": config["num_attention_heads"], "num_kv_heads": config["num_key_value_heads"]}
    facts = Facts("cuda", arch, torch.bfloat16, shapes | {"kv_fp8": int(fp8)})
    return bind(("aiter", "torch"), facts, finder=partial(find_impls), opaque=opaque)


@pytest.mark.parametrize("release", [OLD, NEW])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_tokens_are_torchs(fake: Fake, architecture: str, release: str) -> None:
    host = fake(release, exact=True)
    bindings = bound(architecture)
    assert {row.op for row in bindings.table if row.provider == "aiter"} >= DENSE
    assert bindings.layout == (TOKENS if release == OLD else SHUFFLED)
    wanted = generate(serve(make_model(architecture, TORCH), TORCH), PROMPTS, 12, chunk=16)
    assert len({tuple(tokens) for tokens in wanted}) > 1
    assert not host.calls
    assert generate(serve(make_model(architecture, bindings), bindings), PROMPTS, 12, chunk=16) == wanted
    assert "mm" in host.calls
    by_release = {OLD: {"unified_attention", "reshape_and_cache_flash"}, NEW: new_calls(architecture)}
    assert by_release[release] <= set(host.calls)


def new_calls(architecture: str) -> set[str]:
    heads = {"LlamaForCausalLM": {"pa_fwd_asm", "mha_batch_prefill_func", "fused_qk_rope_reshape_and_cache"}}
    heads["Qwen3ForCausalLM"] = {"pa_fwd_asm", "mha_batch_prefill_func", "fused_qk_norm_rope_cache_quant_shuffle"}
    heads["Qwen2ForCausalLM"] = {"unified_attention", "fused_qk_rope_reshape_and_cache"}
    # its sinks and windows keep the faster kernels away
    heads["GptOssForCausalLM"] = {"unified_attention", "fused_qk_rope_reshape_and_cache"}
    return heads.get(architecture, {"pa_decode_gluon", "unified_attention"})


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("release", [OLD, NEW])
def test_8_bit_pages_give_the_tokens_of_torchs_8_bit_pages(fake: Fake, release: str, arch: str) -> None:
    fake(release, arch, exact=True)
    bindings = bound("Qwen3ForCausalLM", arch, fp8=True)
    kv_dtype = fp8_of(arch)
    wanted = generate(serve(make_model("Qwen3ForCausalLM", TORCH), TORCH, kv_dtype), PROMPTS, 8, chunk=16)
    served = serve(make_model("Qwen3ForCausalLM", bindings), bindings, kv_dtype)
    got = generate(served, PROMPTS, 8, chunk=16)
    same = sum(a == b for left, right in zip(got, wanted, strict=True) for a, b in zip(left, right, strict=True))
    assert same >= 28, "of 32; roundings to 3 bits may turn a token"
    assert not served.runner.cache.storage.float().isnan().any()


def test_bfloat16_runs_as_the_real_one_would_want_it(fake: Fake) -> None:
    """No exactness: the fake takes only what the real one takes."""
    host = fake(NEW)
    for architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        bindings = bound(architecture)
        served = serve(make_model(architecture, bindings, torch.bfloat16), bindings, torch.bfloat16)
        assert all(len(tokens) == 6 for tokens in generate(served, PROMPTS, 6, chunk=16))
    assert {"pa_fwd_asm", "fused_qk_norm_rope_cache_quant_shuffle"} <= set(host.calls)


@pytest.mark.parametrize("release", [OLD, NEW])
def test_copies_of_blocks_stay_right_in_any_layout(fake: Fake, release: str) -> None:
    """A row shares another's first block and has a copy of its second, half full: both go on alike."""
    fake(release, exact=True)
    bindings = bound("Qwen3ForCausalLM")
    served = serve(make_model("Qwen3ForCausalLM", bindings), bindings)
    prompt = list(range(3, 28))
    alone = generate(serve(make_model("Qwen3ForCausalLM", TORCH), TORCH), [prompt], 6, chunk=200)[0]
    first = served.step([(0, 0, 25, True)], added=[start(0, prompt, [7, 3])])
    tokens = [[*prompt, *first], [*prompt, *first]]
    changes = {
        "added": [start(1, tokens[1], [7, 11], computed=25)],
        "copy_source": pack_i32([3]),
        "copy_target": pack_i32([11]),
    }
    for _ in range(5):
        position = len(tokens[0]) - 1
        sampled = served.step([(0, position, 1, True), (1, position, 1, True)], **changes)
        changes = {}
        for row, token in zip(tokens, sampled, strict=True):
            row.append(token)
    assert tokens[0][25:] == tokens[1][25:] == alone


@pytest.fixture
def _fresh() -> Iterator[None]:
    """Compiled code belongs to functions, which all tests share."""
    before = torch._dynamo.config.specialize_float
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.specialize_float = before


@pytest.mark.usefixtures("_fresh")
def test_compiled_pieces_see_none_of_aiter(fake: Fake) -> None:
    host = fake(NEW, exact=True)
    bindings = bound("LlamaForCausalLM", opaque=True)
    model = make_model("LlamaForCausalLM", bindings)
    wanted = generate(serve(model, bindings), PROMPTS, 5, chunk=16)
    host.calls.clear()
    model.pieces = compile_pieces(INDUCTOR, model, "aot_eager")
    assert generate(serve(model, bindings), PROMPTS, 5, chunk=16) == wanted
    assert {"mm", "rmsnorm2d_fwd", "silu_and_mul", "pa_fwd_asm"} <= set(host.calls)


def test_ops_that_aiter_lacks_stay_with_the_next_provider(fake: Fake) -> None:
    fake(NEW)
    table = {row.op: row for row in bound("LlamaForCausalLM").table}
    assert table["embedding"].provider == "torch" and set(table) == set(all_ops())
    assert table["embedding"].reason == "aiter: aiter does not implement it"
