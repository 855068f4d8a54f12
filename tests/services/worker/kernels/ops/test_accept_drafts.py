import torch

from services.worker.kernels.ops.accept_drafts import Drawn, accept_drafts
from services.worker.kernels.ops.draw import draw
from services.worker.kernels.ops.sample import uniform


def test_keeps_what_comes_before_the_first_mistake() -> None:
    for case in accept_drafts.cases:
        tokens, lengths, held, results, entries, ring = case.make(torch.float32)
        slots, context, offsets, ids, drawn = entries
        before, wanted, ends, kept = tokens.clone(), tokens.clone(), lengths.clone(), []
        good = held.clone()
        holding = True
        for entry, offset in enumerate(offsets.tolist()):
            if offset >= 0:
                holding = offset == 0 or (holding and bool(drawn[entry - 1] == ids[entry]))
                if holding:
                    wanted[slots[entry], context[entry]] = drawn[entry]
                    ends[slots[entry]] = context[entry] + 1
                    good[slots[entry]] = offset
            kept.append(int(offset >= 0 and holding))
        accept_drafts.meaning(tokens, lengths, held, results, entries, ring)
        assert torch.equal(tokens, wanted) and torch.equal(lengths, ends) and torch.equal(held, good)
        assert not torch.equal(before, wanted)
        if results is not None:
            count, half = len(drawn), results.shape[1] // 2
            assert results[1, :count].tolist() == drawn.tolist() and results[1, half : half + count].tolist() == kept
            assert not results[0].any()


def test_100_000_drafted_outputs_are_distributed_as_the_model_says() -> None:
    """Three tokens each of a model that sees one token back, with two drafts from another one: chi-square over all
    outputs. Where they are drawn without drafts, they are the same."""
    rows, vocab, drafts, length, temperature = 100_000, 8, 2, 3, 0.8
    generator = torch.Generator().manual_seed(11)
    logits = 1.5 * torch.randn(vocab, vocab, generator=generator)
    guesses = (logits + torch.randn(vocab, vocab, generator=generator)).softmax(-1)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    table = (logits.double() / temperature).softmax(-1)
    some, heat = slice(0, 300), torch.full((300,), temperature)

    def drawn_behind(before: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """What the op draws, which widens each row to a thousand tokens."""
        found = (table.cumsum(-1)[before.long()] <= uniform(seeds, index)[:, None]).sum(-1).clamp(max=vocab - 1).int()
        assert torch.equal(found[some], draw.meaning(logits[before[some].long()], heat, seeds[some], index[some]))
        return found

    plain = torch.zeros(rows, 1 + length, dtype=torch.int32)
    for index in range(length):
        plain[:, index + 1] = drawn_behind(plain[:, index], torch.full((rows,), index))
    tokens = torch.zeros(rows, 2 + length + drafts, dtype=torch.int32)
    lengths, held = torch.ones(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)
    every, offsets = torch.arange(rows), torch.arange(1 + drafts)
    steps, accepted = 0, 0
    while int((lengths <= length).sum()):
        ids = [tokens[every, lengths - 1]]
        for _ in range(drafts):
            ids.append(torch.multinomial(guesses[ids[-1].long()], 1, generator=generator)[:, 0].int())
        found = [drawn_behind(before, lengths - 1 + offset) for offset, before in enumerate(ids)]
        open_rows = lengths <= length
        where = open_rows[:, None].expand(-1, 1 + drafts)
        entries = Drawn(
            every[:, None].expand(-1, 1 + drafts)[where].int(),
            (lengths[:, None] + offsets)[where].int(),
            offsets.expand(rows, -1)[where].int(),
            torch.stack(ids, 1)[where],
            torch.stack(found, 1)[where],
        )
        accept_drafts.meaning(tokens, lengths, held, None, entries, None)
        steps, accepted = steps + int(open_rows.sum()), accepted + int(held[open_rows].sum())
    share = accepted / (drafts * steps)
    assert 0.1 < share < 0.6, share
    assert torch.equal(tokens[:, : length + 1], plain)
    wanted = rows * (table[0][:, None, None] * table[:, :, None] * table[None]).flatten()
    places = tokens[:, 1 : length + 1].long() @ torch.tensor([vocab**2, vocab, 1])
    counts, large = torch.bincount(places, minlength=vocab**3), wanted >= 5
    chi_square = float(((counts - wanted)[large] ** 2 / wanted[large]).sum())
    freedom = int(large.sum()) - 1
    assert freedom > 150 and chi_square < freedom + 4 * (2 * freedom) ** 0.5, (chi_square, freedom)
