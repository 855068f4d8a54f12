"""Predicted floors of decode steps on AMD GPUs, as the tables of docs/rocm.md. Nothing is measured here.

python -m benchmarks.predict            # prints them
python -m benchmarks.predict --write docs/rocm.md   # puts them between the marks there
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpus import AMD, BF16, FP8, MXFP4, MXFP4_EXPERTS, REACHED, Format, Machine
from benchmarks.peers import ATOM, PUBLISHED_CONTEXT, Published
from benchmarks.roofline import decode_floor_ms
from benchmarks.shapes import GPT_OSS_120B, LLAMA_70B, MODELS, ModelShape

CONTEXT = 512 + 256 / 2  # as the figures of the README: prompts of 512, in the middle of outputs of 256
BATCHES = (1, 256)
FORMATS = (BF16, FP8)
STORED = {LLAMA_70B.name: (LLAMA_70B, MXFP4), GPT_OSS_120B.name: (GPT_OSS_120B, MXFP4_EXPERTS)}
BEGIN, END = "<!-- python -m benchmarks.predict --write docs/rocm.md -->\n", "<!-- end -->\n"


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def header(cells: list[str]) -> str:
    return row(cells) + row(["---"] * len(cells))


def pair(shape: ModelShape, rows: int, context: float, form: Format, machine: Machine) -> str:
    """Floor at the peak, and at REACHED of the bandwidth, in ms."""
    figures = [decode_floor_ms(shape, rows, context, form, machine, reached) for reached in (1.0, REACHED)]
    return " / ".join(f"{figure:.2f}" for figure in figures)


def floors() -> Iterator[str]:
    """Each model, format and batch on each GPU."""
    yield header(["model", "format", "batch", *(gpu.name for gpu in AMD)])
    for shape in MODELS:
        for form in FORMATS:
            for rows in BATCHES:
                figures = [pair(shape, rows, CONTEXT, form, gpu) for gpu in AMD]
                yield row([shape.name, form.name, str(rows), *figures])


def beside_atom() -> Iterator[str]:
    """What ATOM has published for one GPU, beside the floor at its batch."""
    yield header(["model", "format", "streams", "GPU", "floor, ms", "ATOM, ms per token", "ATOM, output tokens/s"])
    for published in ATOM:
        yield from _published(published)


def _published(published: Published) -> Iterator[str]:
    shape, form = STORED[published.model]
    gpu = next(gpu for gpu in AMD if gpu.name == published.gpu)
    for rows, (rate, token_ms) in published.tokens_ms.items():
        floor = pair(shape, rows, PUBLISHED_CONTEXT, form, gpu)
        yield row(
            [shape.name, form.name, str(rows), f"{gpu.name} ({published.date})", floor, f"{token_ms}", f"{rate:,.0f}"]
        )


def text() -> str:
    """Both tables, as docs/rocm.md has them between its marks."""
    return "".join([*floors(), "\n", *beside_atom()])


def renewed(document: str) -> str:
    """The document with the tables of today between the marks."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="DOCUMENT")
    arguments = parser.parse_args()
    if arguments.write:
        arguments.write.write_text(renewed(arguments.write.read_text()))
    else:
        print(text(), end="")


if __name__ == "__main__":
    main()
