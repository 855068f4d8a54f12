"""How decode rows are cut into parts, and that no way of cutting them changes what comes out."""

from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl

from services.worker.kernels.impl.triton import _decode_attention
from services.worker.kernels.impl.triton._decode_attention import Shape, choose, default_shape, launch
from services.worker.kernels.impl.triton.embedding import embedding_by_blocks
from services.worker.kernels.impl.triton.rope_kv_write import rope_kv_write_heads
from services.worker.kernels.ops.kv_write import KvScale
from services.worker.kernels.ops.paged_attention import (
    AttentionRows,
    AttentionSpec,
    Extras,
    make_attention_case,
    paged_attention,
)


@triton.jit
def _deal_all(out_ptr, context_ptr, num_rows, spare, least, BLOCK_KV: tl.constexpr, WINDOW: tl.constexpr, BLOCK_R: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    place = tl.program_id(0)
    row, first, count = _decode_attention._deal(context_ptr, place, num_rows, spare, least, BLOCK_KV, WINDOW, BLOCK_R)
    tl.store(out_ptr + place * 3, row)
    tl.store(out_ptr + place * 3 + 1, first)
    tl.store(out_ptr + place * 3 + 2, count)


def deal(
    lengths: Sequence[int], spare: int, device: torch.device, window: int = 0, least: int = 1
) -> list[tuple[int, int, int]]:
    """(row, the row's first place, the row's parts) of each place that has work."""
    context = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = torch.zeros(len(lengths) + spare, 3, dtype=torch.int32, device=device)
    _deal_all[(len(out),)](out, context, len(lengths), spare, least, BLOCK_KV=16, WINDOW=window, BLOCK_R=16)
    found = [(row, first, count) for row, first, count in out.tolist()]
    return [entry for entry in found if entry[0] < len(lengths)]


@pytest.mark.parametrize("lengths", [[1], [5000], [0, 16, 17, 0], [300] * 5, [2000, 16, 16, 16], [16] * 16])
@pytest.mark.parametrize("spare", [1, 4, 9])
@pytest.mark.parametrize("least", [1, 3])
def test_every_row_has_its_parts_and_no_part_is_empty(
    lengths: list[int], spare: int, least: int, device: torch.device
) -> None:
    places = deal(lengths, spare, device, least=least)
    assert sorted({row for row, _, _ in places}) == list(range(len(lengths)))
    place = 0
    for row, length in enumerate(lengths):
        count = places[place][2]
        assert places[place : place + count] == [(row, place, count)] * count
        assert 1 <= count <= max(1, -(-length // 16))
        place += count
    assert place == len(places)


def test_the_longest_rows_are_cut_most(device: torch.device) -> None:
    assert deal([2000, 16, 16, 160], 8, device)[0] == (0, 0, 7)
    assert {row: count for row, _, count in deal([1600, 800, 16], 6, device)} == {0: 4, 1: 2, 2: 1}


def test_parts_of_short_rows_have_the_least_number_of_blocks(device: torch.device) -> None:
    def parts(length: int, least: int) -> int:
        return deal([length], 9, device, least=least)[0][2]

    assert [parts(16 * 8, least) for least in (1, 2, 3, 8, 20)] == [8, 4, 3, 1, 1]
    assert parts(16 * 90, 3) == parts(16 * 90, 1) == 9


def test_only_the_window_counts(device: torch.device) -> None:
    assert {row: count for row, _, count in deal([4000, 64], 8, device, window=64)} == {0: 4, 1: 4}


@pytest.mark.parametrize(("fused", "early"), [(True, False), (True, True), (False, False), (False, True)])
@pytest.mark.parametrize("block_kv", [16, 64])
@pytest.mark.parametrize("extras", [Extras(), Extras(window=50, softcap=3.0, sinks=True, fp8=True), Extras(64)])
def test_parts_join_to_the_meaning(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, fused: bool, early: bool, block_kv: int, extras: Extras
) -> None:
    monkeypatch.setattr(_decode_attention, "places", lambda *_: 5)
    monkeypatch.setattr(_decode_attention, "JOINED", 2 * 4 * 64)  # two parts at once
    _decode_attention._plan.cache_clear()
    case = make_attention_case("", [1, 1, 1], [250, 3, 120], (6, 2, 64), extras=extras)
    q, k_cache, v_cache, rows, spec = case.make(torch.float32)
    wanted = paged_attention.meaning(q, k_cache, v_cache, rows, spec)

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    moved = {name: there(getattr(rows, name)) for name in ("query_starts", "context_lens", "block_tables")}
    rows = type(rows)(**moved, block_tokens=rows.block_tokens, max_query=1, max_context=999, num_decode=3)
    spec = spec._replace(
        sinks=spec.sinks if spec.sinks is None else there(spec.sinks),
        kv_scale=None if spec.kv_scale is None else KvScale(*(there(scale) for scale in spec.kv_scale)),
    )
    shape = Shape(block_kv, 4, 1, 1.0, fused, least=2, early=early)
    for _ in range(2):  # the second finds the counters that the first has left
        out = torch.full(q.shape, torch.nan, device=device)
        launch(there(q), out, there(k_cache), there(v_cache), rows, spec, shape)
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-5, atol=1e-5)
    _decode_attention._plan.cache_clear()


@pytest.mark.parametrize("early", [False, True])
def test_a_row_without_context_gives_zeros(device: torch.device, early: bool) -> None:
    """Rows that pad a captured batch. Their tables, and the pages that nobody has written yet, may hold anything."""
    q, k_cache, v_cache, rows, _ = make_attention_case("", [1, 1], [20, 1], (2, 1, 32)).make(torch.float32)
    moved = {name: getattr(rows, name).clone() for name in ("query_starts", "block_tables")}
    moved["block_tables"][1] = 1 << 30
    unwritten = next(page for page in range(len(k_cache)) if page not in rows.block_tables[0, :2])
    k_cache[unwritten], v_cache[unwritten] = torch.nan, torch.nan
    moved = {name: tensor.to(device) for name, tensor in moved.items()}
    context = torch.tensor([20, 0], dtype=torch.int32, device=device)
    rows = type(rows)(**moved, context_lens=context, block_tokens=16, max_query=1, max_context=20, num_decode=2)
    out = torch.full(q.shape, torch.nan, device=device)
    shape = Shape(16, 4, 1, 1.0, early=early)
    launch(q.to(device), out, k_cache.to(device), v_cache.to(device), rows, AttentionSpec(0.2), shape)
    assert not out[0].isnan().any() and not out[1].any()


@pytest.mark.parametrize("early", [False, True])
def test_pages_before_the_window_are_not_touched(device: torch.device, early: bool) -> None:
    """The scheduler may have given them to others, and their numbers may be anything."""
    case = make_attention_case("", [1, 1], [250, 40], (2, 1, 32), extras=Extras(window=20))
    q, k_cache, v_cache, rows, spec = case.make(torch.float32)
    wanted = paged_attention.meaning(q, k_cache, v_cache, rows, spec)
    tables = rows.block_tables.clone()
    tables[0, : (250 - 20) // 16] = 1 << 30
    tables[1, : (40 - 20) // 16] = 1 << 30
    rows = type(rows)(
        rows.query_starts.to(device), rows.context_lens.to(device), tables.to(device), 16, 1, 250, num_decode=2
    )
    out = torch.full(q.shape, torch.nan, device=device)
    launch(q.to(device), out, k_cache.to(device), v_cache.to(device), rows, spec, Shape(64, 4, 1, 1.0, early=early))
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.on_device
@pytest.mark.parametrize("early", [False, True])
def test_the_newest_token_is_read_after_it_was_written(device: torch.device, early: bool) -> None:
    """A chain of dependent launches, as a step has it: the pages hold something else until the kernel ahead ends."""
    layers, page, context, dim = 6, 16, 70, 64
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, torch.bfloat16)

    caches = [(random(8, page, 2, dim), random(8, page, 2, dim)) for _ in range(layers)]
    inputs = random(layers, 1, 8 * dim)  # 4 heads of queries, 2 of keys, 2 of values
    cos, sin = random(1, dim), random(1, dim)
    tables = torch.arange(8, dtype=torch.int32, device=device)[None].flip(1).contiguous()
    lens = torch.tensor([context], dtype=torch.int32, device=device)
    slots = (tables[0, (context - 1) // page] * page + (context - 1) % page).to(torch.int64)[None]
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    rows = AttentionRows(starts, lens, tables, page, 1, context, num_decode=1)
    ids = torch.zeros(1, dtype=torch.int32, device=device)

    def run(shape: Shape) -> torch.Tensor:
        out = torch.full((layers, 1, 4, dim), torch.nan, device=device, dtype=torch.bfloat16)
        embedding_by_blocks(ids, inputs.view(layers, -1))
        for layer, (k_cache, v_cache) in enumerate(caches):
            q = rope_kv_write_heads(inputs[layer], cos, sin, k_cache, v_cache, slots, None, None)
            launch(q, out[layer], k_cache, v_cache, rows, AttentionSpec(0.1), shape)
        return out

    wanted = run(Shape(32, 2, 1, 1.0)).clone()
    for _ in range(20 if device.type == "cuda" else 1):
        for k_cache, v_cache in caches:
            k_cache.view(-1, 2, dim)[slots], v_cache.view(-1, 2, dim)[slots] = 100.0, torch.nan
        torch.testing.assert_close(run(Shape(32, 2, 1, 1.0, early=early)), wanted, rtol=0.02, atol=0.02)


def test_the_nearest_measured_shape_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(rows: int, kv_heads: int, share: int, block_kv: int) -> dict[str, object]:
        sizes = {"head_dim": 128, "kv_bytes": 2, "rows": rows, "kv_heads": kv_heads, "share": share}
        return {**sizes, "block_kv": block_kv, "num_warps": 4, "num_stages": 3, "waves": 2.0, "fused": True}

    entries = (entry(1, 8, 2, 16), entry(256, 8, 2, 32), entry(1, 4, 8, 64))
    monkeypatch.setattr(_decode_attention, "table", lambda op, device: entries)
    cpu = torch.device("cpu")

    def chosen(rows: int, share: int, kv_heads: int, head_dim: int = 128) -> Shape:
        return choose(cpu, torch.bfloat16, torch.bfloat16, rows, share, kv_heads, head_dim)

    assert [chosen(rows, 2, 8).block_kv for rows in (1, 2, 100, 512)] == [16, 16, 32, 32]
    assert chosen(500, 8, 4).block_kv == 64
    assert chosen(1, 2, 8, 64) == default_shape(2, 2, 64, True)
    assert choose(cpu, torch.float32, torch.float32, 1, 2, 8, 128) == default_shape(4, 4, 128, True)
