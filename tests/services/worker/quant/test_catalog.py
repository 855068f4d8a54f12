"""Formats are found, not listed. The drill: a made-up one, of a made-up tool, is one file."""

from pathlib import Path

import pytest

import services.worker.quant as package
from services.worker.quant import catalog
from tests.services.worker.quant.coded_checkpoints import DENSE, is_coded, random_tensors, write
from tests.services.worker.quant.loading import load, logits

MADE_UP = '''
"""Numbers of a made-up tool: bytes on a line between the least and the largest of a row."""

import torch
from torch.nn import functional

from services.worker.quant.coded import COLUMNS, ROWS, SCALES, VALUES, ZEROS, Axis, CodedFormat, Codes, Piece
from services.worker.quant.forms import CodedWeight, Plain
from services.worker.quant.rules import Rules, named
from services.worker.quant.scheme import ROW, Numbers, Scheme


class Product:
    def __init__(self, codes):
        self.codes, self.num_bytes, self.stored = codes, codes.values.nbytes, None

    def __call__(self, entered, bias, dtype):
        return functional.linear(entered[0], self.dequantize().to(dtype), bias)

    def dequantize(self):
        return FORMAT.decode(self.codes)


class Lines(CodedFormat):
    name = "lines"

    def takes(self, scheme):
        return scheme.weight.kind == "line"

    def pieces(self, scheme):
        row = (Axis(ROWS),)
        return {
            VALUES: Piece(("bytes",), (Axis(ROWS), Axis(COLUMNS)), ("U8",)),
            SCALES: Piece(("step",), row, ("F32",)),
            ZEROS: Piece(("least",), row, ("F32",)),
        }

    def read(self, scheme, stored, shape):
        return Codes(stored[VALUES], stored[SCALES][:, None], stored[ZEROS][:, None])

    def decode(self, codes):
        return codes.values.float() * codes.scales + codes.zeros

    def weight(self, codes, columns, scheme, making):
        return CodedWeight(self.name, tuple(codes.values.shape), Plain(), Product(codes), making)


def read(settings):
    left = settings.names("left")
    settings.finish()
    return Rules("liner", Scheme("liner", Numbers("line", ROW)), named(left))


FORMAT = Lines()
METHODS = {"liner": read}
'''


@pytest.fixture
def fresh() -> object:
    def clear() -> None:
        catalog.all_formats.cache_clear()
        catalog.all_readers.cache_clear()

    clear()
    yield clear
    clear()


def test_a_made_up_format_is_one_file(tmp_path: Path, fresh: object, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "added"
    folder.mkdir()
    (folder / "made_up.py").write_text(MADE_UP)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    tensors, meant = {}, {}
    for name, values in random_tensors(DENSE).items():
        if not is_coded(name, values):
            tensors[name] = meant[name] = values
            continue
        least, most = values.amin(1), values.amax(1)
        step = (most - least) / 255
        numbers = ((values - least[:, None]) / step[:, None]).round()
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.bytes": numbers.byte(), f"{stem}.step": step, f"{stem}.least": least}
        meant[name] = numbers * step[:, None] + least[:, None]
    coded = write(tmp_path / "coded", DENSE, tensors, {"quant_method": "liner", "left": ["lm_head"]})
    decoder, _ = load(coded)
    twin, _ = load(write(tmp_path / "twin", DENSE, meant))
    assert decoder.layers[0].attention.project.weight.format_name == "lines"
    assert float((logits(decoder) - logits(twin)).abs().max()) < 1e-4
    assert len(list(folder.glob("*.py"))) == 1


def test_nothing_else_knows_a_format_by_name() -> None:
    """But the configuration, which lists what a user may ask for."""
    root = Path(package.__path__[0]).parent
    names = [f'"{name}"' for name in catalog.all_formats()]
    for path in (*root.glob("*.py"), *(root / "layers").glob("*.py"), *(root / "models").glob("*.py")):
        text = path.read_text()
        found = [name for name in names if name in text and not (name == '"fp8"' and "kv" in path.name)]
        assert not found, f"{path.name} knows {found[0]}"
