"""The beams of one request on their way: each choice is a beam, and each step of it a request for one token.

Owned by its Request, called by the Streams. A step's prompt is the request's with the beam's tokens behind it, so that
a scheduler finds all but the newest block in its prefix cache, and a new one is given the step again. A choice whose
step is done is in no lane until the next one begins: nobody computes for it. A lost tokenizer's search begins anew.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from common.columns import pack_i32, pack_u64
from common.errors import Reject, RejectReason
from common.logprobs import Report, TokenLogprobs
from common.protocol import Admit, Finished, FinishReason, ModelFacts, TokenBatch
from common.text_format import Beams
from common.vocabulary import Vocabulary
from services.tokenizer.beam_search import BeamSearch, Candidate, candidates_needed

if TYPE_CHECKING:
    from services.tokenizer.lanes import Lane, Lanes
    from services.tokenizer.sequence import Request, Sequence

MOST_CANDIDATES = 1024  # log-probabilities that a scheduler lets a token have
BEFORE = 1  # of priority: what has begun goes on before what has not


class Search:
    def __init__(self, request: "Request", asked: Beams, model: ModelFacts) -> None:
        """Raises Reject for more ends than a step can look beyond."""
        sampling, asked = request.sampling, msgspec.structs.replace(asked, width=request.submit.n)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)}
        self._eos = frozenset(model.eos_token_ids)
        self._request, self._top = request, sampling.report.top
        self._wanted = min(max(candidates_needed(asked.width, len(ends)), self._top), model.vocab_size)
        if self._wanted > MOST_CANDIDATES:
            text = f"{asked.width} beams with {len(ends)} tokens that end them are more than a search can take"
            raise Reject(RejectReason.INVALID, text, "n")
        self._core = BeamSearch(asked, ends, sampling.max_tokens)
        self._choices: list[Sequence] = []
        self._found: dict[int, list[Candidate]] = {}  # by number of the running beam

    def join(self, sequence: "Sequence", lanes: "Lanes", lane: "Lane", vocabulary: Vocabulary) -> None:
        """A choice of the request, whose first beam this lane's scheduler was told of."""
        sequence.restart(vocabulary, self._wanted)
        self._choices.append(sequence)
        if sequence.seq_id == self._request.submit.seq_id:
            lanes.place(sequence, lane)

    def advance(self, sequence: "Sequence", lanes: "Lanes", lane: "Lane", vocabulary: Vocabulary) -> TokenBatch | None:
        """A step of one beam is done. With the last one's the next step begins, or the search ends: all outputs."""
        request, reported = self._request, sequence.reported
        submit = request.submit
        assert reported is not None
        record = reported.of_output(1)
        lanes.rest(sequence)
        sequence.restart(vocabulary, self._wanted)
        if not self._take(sequence.seq_id - submit.seq_id, record) or request.live < submit.n:
            return None  # with one choice given up all will be
        if not self._core.done:
            lane = lanes.choose(request.tokens.tobytes(), submit.cache_salt, submit.seq_id)
            for each in self._choices[: len(self._core.running)]:
                lanes.step(each, lane)
            return None
        request.search = None
        for each in self._choices:
            each.restart(vocabulary, self._top)
            each.cached = self._choices[0].cached
            lanes.place(each, lane)
        return self._result()

    def admission(self, place: int, again: bool) -> Admit:
        """The next token of a running beam; `again`: it may be a repeat, or not the first step."""
        request, submit, beam = self._request, self._request.submit, self._core.running[place]
        step = msgspec.structs.replace(
            request.sampling, max_tokens=1, min_tokens=0, temperature=0.0, report=Report(self._wanted)
        )
        return Admit(
            submit.seq_id + place,
            request.tokens.tobytes() + pack_i32(beam.tokens),
            step,
            priority=submit.priority - (BEFORE if beam.tokens else 0),
            cache_salt=submit.cache_salt,
            again=again or bool(beam.tokens),
            tenant=submit.tenant,
            weight=submit.weight,
            trace=submit.trace,
        )

    def _take(self, place: int, record: bytes) -> bool:
        """What may follow a running beam: a record with `wanted` best tokens. Whether the step is whole."""
        ids = memoryview(record).cast("i")[2 : 2 + self._wanted].tolist()
        logprobs = memoryview(record).cast("f")[3 + self._wanted :].tolist()
        pairs = zip(ids, logprobs, strict=True)
        known = [pair for pair in pairs if pair[0] >= 0]
        top = known[: max(self._top, 0)]
        self._found[place] = [
            Candidate(token, logprob, self._record(rank, token, logprob, top))
            for rank, (token, logprob) in enumerate(known, 1)
        ]
        running = range(len(self._core.running))
        if len(self._found) < len(running):
            return False
        self._core.step([self._found[each] for each in running])
        self._found.clear()
        return True

    def _record(self, rank: int, token: int, logprob: float, top: Iterable[tuple[int, float]]) -> bytes:
        if self._top < 0:
            return b""
        pairs = list(top)
        ids, values = [rank, token, *(each[0] for each in pairs)], [logprob, *(each[1] for each in pairs)]
        return array("i", ids).tobytes() + array("f", values).tobytes()

    def _result(self) -> TokenBatch:
        """The best outputs, the very best first, as if a scheduler had sent them."""
        first = self._request.submit.seq_id
        seq_ids: list[int] = []
        index: list[int] = []
        tokens: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for seq_id, beam in self._outputs(first):
            seq_ids += [seq_id] * len(beam)
            index += range(len(beam))
            tokens += beam
        for place, (_, output) in enumerate(self._core.finished):
            if self._top >= 0:
                logprobs[first + place] = TokenLogprobs(0, b"".join(output.records))
        ends = [self._end(seq_id, beam[-1]) for seq_id, beam in self._outputs(first)]
        return TokenBatch(pack_u64(seq_ids), pack_i32(index), pack_i32(tokens), ends, logprobs=logprobs)

    def _outputs(self, first: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        return ((first + place, output.tokens) for place, (_, output) in enumerate(self._core.finished))

    def _end(self, seq_id: int, last: int) -> Finished:
        sampling = self._request.sampling
        if last in self._eos and not sampling.ignore_eos:
            return Finished(seq_id, FinishReason.EOS, last)
        if last in sampling.stop_token_ids:
            return Finished(seq_id, FinishReason.STOP_TOKEN, last)
        return Finished(seq_id, FinishReason.LENGTH)
