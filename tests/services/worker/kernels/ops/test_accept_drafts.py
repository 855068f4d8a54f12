import torch

from services.worker.kernels.ops.accept_drafts import accept_drafts


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
