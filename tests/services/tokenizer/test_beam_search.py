from typing import Any

import pytest
import torch

from common.text_format import Beams
from services.tokenizer.beam_search import NEVER, STOP_EARLY, BeamSearch, Candidate, candidates_needed

VOCAB = 40  # the last one pads
PROMPT = [3, 7, 11]
EARLY: dict[Any, int] = {False: 0, True: STOP_EARLY, "never": NEVER}


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds: only where it runs

    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, pad_token_id=0, **sizes)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= 12  # outputs that differ
    return model


def searched(model: Any, asked: Beams, ends: list[int], max_tokens: int) -> list[tuple[list[int], float]]:
    search = BeamSearch(asked, ends, max_tokens)
    wanted = min(candidates_needed(asked.width, len(ends)), VOCAB)
    while not search.done:
        rows = torch.tensor([[*PROMPT, *beam.tokens] for beam in search.running])
        with torch.no_grad():
            best = model(rows).logits[:, -1].log_softmax(-1).topk(wanted)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        search.step([[Candidate(*each, b"") for each in zip(*pair, strict=True)] for pair in pairs])
    return [(list(beam.tokens), score) for score, beam in search.finished]


@pytest.mark.parametrize(("early", "penalty"), [(False, 1.0), (True, 0.0), ("never", 2.0), ("never", -1.0)])
@pytest.mark.parametrize(("width", "ends"), [(2, [2]), (4, []), (3, [2, 9, 17, 30]), (5, list(range(8)))])
def test_it_finds_what_transformers_finds(
    model: Any, width: int, ends: list[int], penalty: float, early: bool | str
) -> None:
    told = model.generate(
        torch.tensor([PROMPT]),
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping=early,
        max_new_tokens=7,
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=39,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = searched(model, Beams(width, penalty, EARLY[early]), ends, 7)
    rows = [row[len(PROMPT) :].tolist() for row in told.sequences]
    for (tokens, score), row, theirs in zip(found, rows, told.sequences_scores.tolist(), strict=True):
        assert tokens == row[: len(tokens)] and {*row[len(tokens) :]} <= {39}, "the rest is padding"
        assert score == pytest.approx(theirs, abs=1e-4)
