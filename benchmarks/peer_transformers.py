"""transformers in float32 on the bundled weights; prints JSON. `python -m benchmarks.peer_transformers THREADS`."""

import json
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.worker.source import open_model

PROMPT, STEPS = 64, 24


def load() -> LlamaForCausalLM:
    source = open_model("bundled")
    model = LlamaForCausalLM(LlamaConfig(**source.config))
    model.load_state_dict({name: t.dense(torch.float32) for name, t in source.tensors.items()}, strict=False)
    model.tie_weights()
    return model.eval()


def prompt(length: int, streams: int) -> torch.Tensor:
    return torch.tensor([[(i * 37 + s) % 40_000 + 100 for i in range(length)] for s in range(streams)])


@torch.inference_mode()
def main(threads: int) -> None:
    torch.set_num_threads(threads)
    model = load()
    results = {}
    for streams in (1, 4, 16):
        out = model(input_ids=prompt(PROMPT, streams), use_cache=True, logits_to_keep=1)
        start_s = time.perf_counter()
        for _ in range(STEPS):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        results[f"tokens_per_s_{streams}"] = streams * STEPS / (time.perf_counter() - start_s)
    for length in (512, 1024):
        start_s = time.perf_counter()
        model(input_ids=prompt(length, 1), use_cache=True, logits_to_keep=1)
        results[f"prefill_tokens_per_s_{length}"] = length / (time.perf_counter() - start_s)
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]))
