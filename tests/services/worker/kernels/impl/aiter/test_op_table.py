from pathlib import Path

from services.worker.kernels.layout import SHUFFLED, TOKENS
from services.worker.kernels.ops.moe_tiled import moe_tiled
from services.worker.kernels.ops.mxfp4_linear import mxfp4_linear
from services.worker.kernels.ops.paged_attention import paged_attention
from tests.services.worker.kernels.impl.aiter.fake import NEW, OLD
from tests.services.worker.kernels.impl.aiter.op_table import bound, written

DOCUMENT = Path(__file__).parents[6] / "docs" / "rocm.md"


def test_the_table_in_the_docs_is_the_present_one() -> None:
    text = DOCUMENT.read_text()
    assert written(text) == text, "python -m tests.services.worker.kernels.impl.aiter.op_table --write docs/rocm.md"


def test_choices_differ_where_architecture_or_release_do() -> None:
    ours = bound("30b-a3b", "gfx942", NEW)
    assert ours.layout == SHUFFLED and ours.provider(paged_attention) == ours.provider(moe_tiled) == "aiter"
    assert ours.provider(mxfp4_linear) == "torch"
    assert bound("30b-a3b", "gfx950", NEW).provider(mxfp4_linear) == "aiter"
    assert bound("8b", "gfx942", OLD).layout == TOKENS
