"""The default mode (fast CPU weights) says what the exact mode says where it must: the capital of France."""

from common.columns import pack_i32, unpack_i32
from common.config import load
from common.protocol import RowStart, Sampling, StepPlan
from services.worker.model_engine import ModelEngine

# The bundled chat template around "What is the capital of France?", default system prompt, and the exact mode's answer.
PROMPT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182,
    2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # The capital of France is Paris.<|im_end|>


def greedy(engine: ModelEngine, copies: int) -> list[list[int]]:
    """The answer of every one of `copies` rows that run side by side, prompts included in one step."""
    per_row = -(-(len(PROMPT) + len(ANSWER)) // engine.facts.block_tokens)
    sampling = Sampling(max_tokens=len(ANSWER), temperature=0.0)
    added = [
        RowStart(i, i, pack_i32(PROMPT), len(PROMPT), 0, pack_i32(range(i * per_row, (i + 1) * per_row)), sampling)
        for i in range(copies)
    ]
    outputs: list[list[int]] = [[] for _ in range(copies)]
    for step in range(len(ANSWER)):
        plan = StepPlan(
            step,
            added=added if step == 0 else [],
            slots=pack_i32(range(copies)),
            positions=pack_i32([0 if step == 0 else len(PROMPT) + step - 1] * copies),
            counts=pack_i32([len(PROMPT) if step == 0 else 1] * copies),
            samples=b"\x01" * copies,
        )
        for output, token in zip(outputs, unpack_i32(engine.execute(plan).tokens()), strict=True):
            output.append(token)
    engine.reset()
    return outputs


def test_answers_paris_alone_and_side_by_side() -> None:
    engine = ModelEngine(
        load(None, ["kv.blocks=128", "scheduler.max_rows=16", "model.max_len=512"]), lambda stage: None
    )
    # One row uses the weights' form for few rows, twelve the form for many.
    assert greedy(engine, 1) == [ANSWER]
    assert greedy(engine, 12) == [ANSWER] * 12
