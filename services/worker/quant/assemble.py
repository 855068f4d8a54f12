"""Finds the coded matrices among a checkpoint's tensors, and holds each against its description before any is read.

The loader calls `assemble` with the names and shapes that the model declares; what comes back has one tensor for each,
as if nothing were coded. Scales of the KV cache are taken out by `take_kv_scales`.
"""

import math
import re
from collections.abc import Iterator, Mapping

import torch

from common.errors import ConfigError
from services.worker.quant.coded import ALL, COLUMNS, ROWS, VALUES, Coded, CodedFormat, Piece, RawTensor, check_scales
from services.worker.quant.contract import StoredTensor
from services.worker.quant.detect import format_of
from services.worker.quant.rules import Rules
from services.worker.quant.scheme import GROUP, Scheme

FLOATS = ("F64", "F32", "F16", "BF16")
CODED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL")
KV_SCALES = re.compile(
    r"model\.layers\.(\d+)\.self_attn\.(?:attn\.)?(?:([kv])_scale|([kv])_proj\.(?:[kv]_scale|output_scale))"
)
UNIT_SCALES = re.compile(r".*\.self_attn\.(?:attn\.)?(?:q_scale|prob_scale|q_proj\.output_scale)")


def assemble(
    tensors: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], rules: Rules | None
) -> dict[str, StoredTensor]:
    """By name; coded matrices in place of their pieces. Raises ConfigError naming tensor and file."""
    found = dict(tensors)
    for name, shape in expected.items():
        if len(shape) != 2 or isinstance(found.get(name), Coded):
            continue
        stem = name.removesuffix(".weight")
        stored = found.get(name)
        module = _module(stem, stored, found, rules)
        scheme = rules.scheme_of(module) if rules is not None else None
        if scheme is None:
            _must_be_dense(name, stored, rules)
            continue
        assert rules is not None
        form = format_of(scheme, rules.method)
        pieces = {role: _piece(stem, piece, found) for role, piece in form.pieces(scheme).items()}
        if stored is not None and stored.storage not in CODED:
            _must_stand_alone(name, stored, stem, {role: p for role, p in pieces.items() if role != VALUES}, rules)
            continue
        coded = _coded(name, (shape[0], shape[1]), form, scheme, pieces)
        for _, full, tensor in pieces.values():
            if tensor is not None:
                del found[full]
        found[name] = coded
    return found


def _suffixes(form: CodedFormat, scheme: Scheme) -> Iterator[str]:
    for piece in form.pieces(scheme).values():
        yield from piece.names


def _module(stem: str, stored: StoredTensor | None, tensors: Mapping[str, StoredTensor], rules: Rules | None) -> str:
    """As the file names it, which rules are about; prefixes may be others there."""
    if stored is not None:
        return stored.name.removesuffix(".weight")
    for scheme in rules.schemes if rules is not None else ():
        for suffix in _suffixes(format_of(scheme, ""), scheme):
            if (piece := tensors.get(f"{stem}.{suffix}")) is not None:
                return piece.name.removesuffix(f".{suffix}")
    return stem


def _piece(stem: str, piece: Piece, tensors: Mapping[str, StoredTensor]) -> tuple[Piece, str, StoredTensor | None]:
    """And the name it has, or should have."""
    for suffix in piece.names:
        if (tensor := tensors.get(f"{stem}.{suffix}")) is not None:
            return piece, f"{stem}.{suffix}", tensor
    return piece, f"{stem}.{piece.names[0]}", None


def _must_be_dense(name: str, stored: StoredTensor | None, rules: Rules | None) -> None:
    if stored is not None and stored.storage in CODED:
        why = "config.json has no quantization_config" if rules is None else f"its {rules.method} excepts it"
        raise ConfigError(f'{stored.source}: tensor "{stored.name}" is stored as {stored.storage}, but {why}')


def _must_stand_alone(
    name: str,
    stored: StoredTensor,
    stem: str,
    others: Mapping[str, tuple[Piece, str, StoredTensor | None]],
    rules: Rules,
) -> None:
    """A matrix that is stored as floats is no coded one, whatever the rules say, unless it has scales."""
    for _, other, tensor in others.values():
        if tensor is not None:
            raise ConfigError(f'{stored.source}: tensor "{name}" is stored as {stored.storage}, but there is "{other}"')


def _coded(
    name: str,
    shape: tuple[int, int],
    form: CodedFormat,
    scheme: Scheme,
    pieces: Mapping[str, tuple[Piece, str, StoredTensor | None]],
) -> Coded:
    files = sorted({tensor.source for _, _, tensor in pieces.values() if tensor is not None})
    kept: dict[str, tuple[Piece, RawTensor]] = {}
    for role, (piece, full, tensor) in pieces.items():
        if tensor is None:
            if not piece.optional:
                place = f" (looked in {', '.join(files)})" if files else ""
                raise ConfigError(f'"{name}" is coded as {form.name}, but the checkpoint lacks "{full}"{place}')
            continue
        if tensor.storage not in piece.storages or not isinstance(tensor, RawTensor):
            raise ConfigError(
                f'{tensor.source}: tensor "{full}" is stored as {tensor.storage}, '
                f"expected {' or '.join(piece.storages)}"
            )
        group = scheme.weight.group
        if scheme.weight.per == GROUP and shape[1] % group:
            raise ConfigError(f'{tensor.source}: groups of {group} do not divide the {shape[1]} columns of "{name}"')
        _check_shape(full, tensor, piece, shape)
        kept[role] = (piece, tensor)
    return Coded(name, shape, form, scheme, kept)


def _check_shape(full: str, tensor: StoredTensor, piece: Piece, shape: tuple[int, int]) -> None:
    wanted = [-(-shape[axis.of] // axis.per) for axis in piece.axes]
    if any((axis.of, axis.per) == (ROWS, ALL) for axis in piece.axes):
        return  # as long as it likes: nothing is read from it
    found = list(tensor.shape)
    if _bare(found) != _bare(wanted):
        raise ConfigError(f'{tensor.source}: tensor "{full}" has shape {found}, expected {wanted} for {list(shape)}')
    for axis, size in zip(piece.axes, wanted, strict=True):
        if axis.per not in (1, ALL) and axis.per < 16 and shape[axis.of] % axis.per:
            side = "columns" if axis.of == COLUMNS else "rows"
            raise ConfigError(f'{tensor.source}: {shape[axis.of]} {side} of "{full}" do not fill {size} words')


def _bare(shape: list[int]) -> list[int]:
    """Without dimensions of one entry, which tools add and leave out."""
    return [size for size in shape if size != 1]


def take_kv_scales(tensors: dict[str, StoredTensor]) -> dict[int, tuple[float, float]]:
    """Removes the scales of keys and values, by layer. Raises ConfigError for one alone and for wrong ones."""
    found: dict[int, dict[str, float]] = {}
    for name in [name for name in tensors if ".self_attn." in name and name.endswith("_scale")]:
        match = KV_SCALES.fullmatch(name)
        if match is None:
            if UNIT_SCALES.fullmatch(name):
                del tensors[name]  # of queries and probabilities, which stay wide here
            continue
        tensor = tensors.pop(name)
        values = tensor.dense(torch.float32)
        check_scales(values, tensor)
        if math.prod(tensor.shape) != 1:
            raise ConfigError(f'{tensor.source}: tensor "{name}" has shape {list(tensor.shape)}, expected one number')
        found.setdefault(int(match[1]), {})[match[2] or match[3]] = float(values)
    for layer, both in found.items():
        if set(both) != {"k", "v"}:
            raise ConfigError(f"layer {layer} has a scale of {' and '.join(both)} only, not of keys and values")
    return {layer: (both["k"], both["v"]) for layer, both in found.items()}
