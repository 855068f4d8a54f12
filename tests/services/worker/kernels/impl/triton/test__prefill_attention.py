"""Any rows as prompts and chunks: against the op's meaning, in one part and split over the context, from any row on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.kernels.impl.triton import _prefill_attention
from services.worker.kernels.impl.triton._prefill_attention import (
    AOT,
    Tile,
    choose_tile,
    default_tile,
    forget_choices,
    launch,
    prefill,
)
from services.worker.kernels.ops.paged_attention import (
    AttentionRows,
    AttentionSpec,
    Extras,
    make_attention_case,
    paged_attention,
)
from services.worker.kernels.registry import Impl


def run(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, spec: AttentionSpec) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    prefill(q, out, k_cache, v_cache, rows, spec, 0, 0)
    return out


def test_equals_the_meaning(hold: Callable[..., None]) -> None:
    """The op's own test runs its other cases."""
    cases = [
        case for case in paged_attention.cases if case.name in ("mixed", "head192", "window_sinks", "fp8", "empty")
    ]
    hold(Impl(paged_attention, "triton", run), cases=cases, strided=(0,))


def test_splits_give_the_same(hold: Callable[..., None]) -> None:
    """A small tile, so that short contexts have several blocks; some rows have no keys in some of the parts."""

    def split(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, spec: AttentionSpec) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        launch(q, out, k_cache, v_cache, rows, spec, 0, 0, Tile(32, 32, 4, 1), 4)
        return out

    cases = [
        make_attention_case("chunks", [17, 1, 30], [150, 90, 30], (3, 1, 64)),
        make_attention_case("window_sinks", [12], [120], (2, 1, 96), extras=Extras(window=50, sinks=True)),
        make_attention_case("page64", [9, 3], [100, 65], (2, 1, 64), extras=Extras(64, softcap=3.0, table_rows=True)),
        make_attention_case("page48", [5], [70], (1, 1, 64), extras=Extras(48, fp8=True, sinks=True)),
    ]
    hold(Impl(paged_attention, "triton", split), cases=cases)


def test_rows_before_the_first_stay_as_they_are(device: torch.device) -> None:
    case = make_attention_case(
        "mixed", [1, 1, 1, 20, 3, 1], [40, 7, 30, 70, 3, 65], (4, 2, 64), extras=Extras(sinks=True)
    )
    q, k_cache, v_cache, rows, spec = case.make(torch.float32)
    wanted = paged_attention.meaning(q, k_cache, v_cache, rows, spec)

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    rows = replace(
        rows, **{name: there(getattr(rows, name)) for name in ("query_starts", "context_lens", "block_tables")}
    )
    for splits in (1, 2):
        out = torch.full(q.shape, torch.nan, device=device)
        arguments = (there(q), out, there(k_cache), there(v_cache), rows, spec._replace(sinks=there(spec.sinks)), 3, 3)
        launch(*arguments, Tile(32, 16, 4, 1), splits)
        assert out[:3].isnan().all()
        torch.testing.assert_close(out[3:].cpu(), wanted[3:], rtol=1e-5, atol=1e-5)


def test_keys_of_others_do_not_matter(device: torch.device) -> None:
    """Not even NaN in blocks that a row reads, behind its end."""
    q, k_cache, v_cache, rows, spec = make_attention_case("ends", [5, 2], [21, 34], (2, 1, 64)).make(torch.float32)
    wanted = paged_attention.meaning(q, k_cache, v_cache, rows, spec)
    own = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
    for row, length in enumerate(rows.context_lens.tolist()):
        for i in range(length):
            own[rows.block_tables[row, i // 16], i % 16] = True
    k_cache[~own] = torch.nan
    v_cache[~own] = torch.nan
    rows = replace(
        rows,
        query_starts=rows.query_starts.to(device),
        context_lens=rows.context_lens.to(device),
        block_tables=rows.block_tables.to(device),
    )
    got = run(q.to(device), k_cache.to(device), v_cache.to(device), rows, spec)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_pages_before_the_window_are_not_read(device: torch.device) -> None:
    """Nor are their entries of the table: they may be of nobody."""
    case = make_attention_case("window", [5], [150], (2, 1, 64), extras=Extras(window=20))
    q, k_cache, v_cache, rows, spec = case.make(torch.float32)
    wanted = paged_attention.meaning(q, k_cache, v_cache, rows, spec)
    before = (150 - 5 - 20 + 1) // 16
    unused = rows.block_tables[0, :before].long()
    k_cache[unused] = torch.nan
    v_cache[unused] = torch.nan
    rows.block_tables[0, :before] = 10**9
    rows = replace(
        rows,
        query_starts=rows.query_starts.to(device),
        context_lens=rows.context_lens.to(device),
        block_tables=rows.block_tables.to(device),
    )
    got = run(q.to(device), k_cache.to(device), v_cache.to(device), rows, spec)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_tiles_hold_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, half = torch.device("cpu"), torch.float16
    assert choose_tile(cpu, half, half, 128, 71, True).block_m == 128
    assert choose_tile(cpu, torch.float32, torch.float32, 128, 71, False).block_m == 128
    tile = default_tile(2, 112, small_lds=False)._replace(block_n=16)
    row = {"head_dim": 112, "kv_bytes": 2, "short": True, **tile._asdict()}
    monkeypatch.setattr(_prefill_attention, "table", lambda op, device: (row,))
    assert choose_tile(cpu, half, half, 112, 4, True) == tile
    assert choose_tile(cpu, half, half, 112, 4, False) != tile
    assert choose_tile(cpu, half, torch.float8_e4m3fn, 112, 4, True) != tile
    forget_choices()


def test_first_call_compiles_what_later_ones_may_need(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    compiled: list[tuple[bool, bool]] = []

    def note(*arguments: Any, compile_only: bool = False) -> None:
        compiled.append((compile_only, bool(arguments[-1].sums)))

    monkeypatch.setattr(_prefill_attention, "_run", note)
    monkeypatch.setattr(_prefill_attention, "_COMPILED", set())
    q, k_cache, v_cache, rows, spec = make_attention_case("", [3], [9], (2, 1, 64)).make(torch.float16)
    q, k_cache, v_cache = q.to(device), k_cache.to(device), v_cache.to(device)
    run(q, k_cache, v_cache, rows, spec)
    assert compiled == [(True, False), (True, True), (True, False), (True, True), (False, False)]
    run(q[:1], k_cache, v_cache, rows, spec)
    run(q, k_cache, v_cache, rows, spec._replace(window=7))
    assert compiled[5] == (False, False) and len(compiled) == 11


def test_compiled_ahead_for_every_head_size() -> None:
    assert {case.signature.get("HEAD_DIM") for case in AOT} >= {64, 128, 192, 256}
