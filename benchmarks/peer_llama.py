"""llama.cpp on the bundled model, in whichever Python has llama-cpp-python; prints JSON. Needs nothing of ours.

`python benchmarks/peer_llama.py MODEL.gguf THREADS` - see benchmarks/bundled.py, which runs it.
"""

import json
import sys
import time

import llama_cpp
import numpy as np

PROMPT, STEPS = 64, 48


def fill(batch, rows: list[tuple[int, int, int, bool]]) -> None:  # type: ignore[no-untyped-def]
    """rows: (token, position, sequence, whether logits are wanted)."""
    batch.n_tokens = len(rows)
    for place, (token, position, sequence, wanted) in enumerate(rows):
        batch.token[place], batch.pos[place], batch.logits[place] = token, position, wanted
        batch.seq_id[place][0], batch.n_seq_id[place] = sequence, 1


def main(path: str, threads: int) -> None:
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    if hasattr(model_params, "use_extra_bufts"):
        model_params.use_extra_bufts = False  # 0.3.36 crashes with its AMX buffers
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    results = {}
    for streams in (1, 4, 16):
        context = new_context(model, streams, threads)
        batch = llama_cpp.llama_batch_init(1024, 0, streams)
        for sequence in range(streams):
            fill(batch, [((i * 37 + sequence) % 40_000 + 100, i, sequence, i == PROMPT - 1) for i in range(PROMPT)])
            assert llama_cpp.llama_decode(context, batch) == 0
        start_s = time.perf_counter()
        for step in range(STEPS):
            fill(batch, [(500 + sequence, PROMPT + step, sequence, True) for sequence in range(streams)])
            assert llama_cpp.llama_decode(context, batch) == 0
            for sequence in range(streams):  # the greedy choice
                logits = llama_cpp.llama_get_logits_ith(context, sequence)
                np.ctypeslib.as_array(logits, shape=(vocabulary,)).argmax()
        results[f"tokens_per_s_{streams}"] = streams * STEPS / (time.perf_counter() - start_s)
        llama_cpp.llama_free(context)
    for length in (512, 1024):
        context = new_context(model, 1, threads)
        batch = llama_cpp.llama_batch_init(1024, 0, 1)
        fill(batch, [((i * 37) % 40_000 + 100, i, 0, i == length - 1) for i in range(length)])
        start_s = time.perf_counter()
        assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_get_logits_ith(context, length - 1)
        results[f"prefill_tokens_per_s_{length}"] = length / (time.perf_counter() - start_s)
        llama_cpp.llama_free(context)
    print(json.dumps(results))


def new_context(model, streams: int, threads: int):  # type: ignore[no-untyped-def]
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 4096, 1024, 512, streams
    params.n_threads = params.n_threads_batch = threads
    return llama_cpp.llama_init_from_model(model, params)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
