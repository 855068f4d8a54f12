"""Hypothesis strategies for what messages hold: ids that meet, numbers at the edges, columns that do not fit."""

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from common.columns import pack_i32
from common.protocol import Admit, ModelFacts, Sampling, make_seq_id

EDGES = (-(2**63), -(2**31), -1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
VOCAB, MAX_LEN, BLOCK_TOKENS, BLOCKS = 50, 24, 4, 12

edges = st.sampled_from(EDGES)
integers = st.one_of(st.integers(-2, 40), edges)
floats = st.one_of(st.sampled_from((0.0, 1.0, -1.0, 1e300, float("nan"), float("inf"))), st.floats(width=64))
known_ids = st.builds(make_seq_id, st.integers(0, 1), st.integers(0, 1), st.just(77), st.integers(0, 9))
seq_ids = st.one_of(known_ids, known_ids, known_ids, edges)
texts = st.one_of(st.just(""), st.text(max_size=8))
good_columns = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_LEN + 2).map(pack_i32)
columns = st.one_of(
    good_columns, good_columns, st.lists(st.integers(-3, 99), max_size=9).map(pack_i32), st.binary(max_size=9)
)
good_samplings = st.builds(
    Sampling, max_tokens=st.integers(1, 9), stop_token_ids=st.lists(st.integers(0, VOCAB), max_size=2).map(tuple)
)


def samplings() -> SearchStrategy[Sampling]:
    """Any numbers in any field."""
    return st.one_of(
        good_samplings,
        st.builds(
            Sampling,
            max_tokens=integers,
            seed=integers,
            temperature=floats,
            top_p=floats,
            top_k=integers,
            min_p=floats,
            presence_penalty=floats,
            frequency_penalty=floats,
            repetition_penalty=floats,
            min_tokens=integers,
            ignore_eos=st.booleans(),
            stop_token_ids=st.lists(integers, max_size=3).map(tuple),
            logit_bias=st.lists(st.tuples(integers, floats), max_size=3).map(tuple),
        ),
    )


def admits() -> SearchStrategy[Admit]:
    good = st.builds(Admit, seq_id=known_ids, tokens=good_columns, sampling=good_samplings, n=st.integers(1, 3))
    bad = st.builds(
        Admit,
        seq_id=seq_ids,
        tokens=columns,
        sampling=samplings(),
        n=integers,
        priority=integers,
        cache_salt=texts,
        output=st.one_of(st.just(b""), columns),
        origin=st.one_of(st.just(-1), seq_ids),
    )
    odd = st.builds(Admit, seq_id=known_ids, tokens=good_columns, sampling=samplings(), cache_salt=texts)
    return st.one_of(good, odd, bad)


FACTS = ModelFacts("tiny", "fake", VOCAB, MAX_LEN, (2,), BLOCK_TOKENS, BLOCKS)
good_facts = st.just(FACTS)


def facts() -> SearchStrategy[ModelFacts]:
    """What a worker says of its model; mostly sane."""
    absurd = st.builds(
        ModelFacts,
        name=texts,
        architecture=texts,
        vocab_size=integers,
        max_model_len=integers,
        eos_token_ids=st.lists(integers, max_size=3).map(tuple),
        block_tokens=integers,
        num_blocks=integers,
    )
    return st.one_of(good_facts, good_facts, good_facts, absurd)
