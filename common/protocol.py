"""Every message between processes. docs/protocol.md explains them; a test holds the two together.

One union per receiver (`ToApi`, `ToTokenizer`, `ToScheduler`, `ToWorker`, `ToAdmin`); each process has one inbox.
Structs travel as msgpack arrays and grow only by fields appended with defaults. Columns are packed (common/columns.py):
`_i32` and `_u64` in a comment give the width; columns of one message that belong together have equal lengths.
"""

import msgspec

from common.constraints import Grammar as Grammar
from common.constraints import RowFault as RowFault
from common.constraints import ToolUse as ToolUse
from common.kinds import FinishReason as FinishReason
from common.kinds import PromptKind as PromptKind
from common.logprobs import Report, StepLogprobs, TextLogprobs, TokenLogprobs
from common.pooling import Embedding as Embedding
from common.pooling import Pooling as Pooling
from common.seq_id import api_of as api_of
from common.seq_id import make_seq_id as make_seq_id
from common.seq_id import tokenizer_of as tokenizer_of
from common.text_format import Beams as Beams
from common.text_format import Options as Options
from common.text_format import Repetition as Repetition
from common.text_format import TextFormat as TextFormat
from common.values import Copies as Copies
from common.values import Growth as Growth
from common.values import KvGroup as KvGroup
from common.values import Load as Load
from common.values import Member as Member
from common.values import ModelFacts as ModelFacts
from common.values import Peer as Peer
from common.values import Progress as Progress
from common.values import RowTable as RowTable
from common.values import ServiceName as ServiceName
from common.values import State as State
from common.values import Struct as Struct
from common.values import Tally as Tally
from common.words import Words as Words

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=True):
    """A whole frame's payload; tagged with its class name."""


class Sampling(Struct, frozen=True):
    """How output tokens are chosen and when they end. The seed is always resolved (by the API if none is given)."""

    max_tokens: int  # 0 where report.pooling asks for a vector instead
    seed: int = 0  # choice i of a request samples with seed + i (mod 2**64)
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None  # with one, min_tokens and ignore_eos give way where it allows nothing but an end
    report: Report = Report()
    words: Words = Words()


class Finished(Struct, frozen=True):
    """The one terminal of a sequence, scheduler to tokenizer."""

    seq_id: int
    reason: FinishReason
    stop_token: int = -1  # the token that ended it, for EOS and STOP_TOKEN
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    message: str = ""  # for ERROR
    code: str = ""  # for ERROR: common.errors.RejectReason, "" is internal
    vector: bytes = b""  # float32, of a prompt that is pooled


class TextFinished(Struct, frozen=True):
    """The one terminal of a sequence, tokenizer to API."""

    seq_id: int
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    stop_token: int = -1
    stop_string: str = ""
    message: str = ""
    code: str = ""  # as in Finished
    reasoning_tokens: int = 0  # of the output
    vector: bytes = b""  # as in Finished


class RowStart(Struct, frozen=True):
    """A sequence takes a worker row. The row knows all its tokens; the first `computed` already have KV in `blocks`."""

    slot: int
    seq_id: int
    tokens: bytes  # _i32: prompt, and output so far after a preemption
    num_prompt: int
    computed: int
    blocks: bytes  # _i32: block table so far
    sampling: Sampling
    first: int = 0  # of `blocks`, as in RowTable
    tables: tuple[RowTable, ...] = ()  # of the groups behind the first one, in their order
    trace: str = ""


class Hello(Message, frozen=True):
    """First message of every process start, repeated until the sender sees itself in `Members`."""

    peer: Peer
    config_hash: str
    protocol_version: int = PROTOCOL_VERSION
    ledger: dict[str, Tally] = {}  # as it stood in the last Members that the sender knows


class Heartbeat(Message, frozen=True):
    """Sent every `links.heartbeat_s`. Counters are cumulative since the process start; gauges end in `_now`."""

    state: State
    progress: int
    stage: Progress | None = None
    counters: dict[str, float] = {}
    histograms: dict[str, bytes] = {}  # common/buckets.py


class Goodbye(Message, frozen=True):
    """The sender leaves on purpose; a tokenizer's open sequences go to another one."""


class Members(Message, frozen=True):
    """A scheduler's view, to all its members: on change, and every `links.heartbeat_s` as its own heartbeat."""

    members: list[Member]
    departed: list[int]  # frames of these incarnations are dropped
    load: Load
    model: ModelFacts | None = None  # None until a worker is ready
    schedulers: int = 0  # that there should be, this one included; 0: as configured
    ledger: dict[str, Tally] = {}  # by "service-instance"; only to API processes, as are the members' figures
    log_level: str = ""  # of all processes; empty: as configured
    profile: bool = False  # workers record what their device does


class Submit(Message, frozen=True):
    """One request, with `n` choices. Ends with n terminals in TextBatch, or one Refused."""

    seq_id: int
    kind: PromptKind
    sampling: Sampling
    text: str = ""
    tokens: bytes = b""  # _i32
    messages: bytes = b""  # JSON: OpenAI's list of messages, content already checked
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    priority: int = 0  # smaller is sooner
    cache_salt: str = ""
    template_kwargs: bytes = b""  # JSON object
    origin: int = -1  # the choice's first seq_id, if another tokenizer had it before; n is then 1
    delivered_tokens: int = 0  # with origin: the API has so many tokens of its output
    delivered_chars: int = 0  # and so many characters of its text; only what follows is sent
    tenant: str = ""  # name of the API key; tenants share the scheduler by weight
    weight: int = 1
    parts: int = 0  # of the answer that the API tells apart: 1 reasoning, 2 tool calls; 3 both
    options: Options = Options()
    trace: str = ""  # common/trace_context.py


class Abort(Message, frozen=True):
    seq_id: int  # its client has gone; takes its Submit's way API -> tokenizer -> scheduler, so never overtakes it


class Tokenize(Message, frozen=True):
    """/tokenize: text, messages or a whole request to the ids of its prompt, answered by `Tokenized`."""

    call_id: int  # a seq_id of its own
    kind: PromptKind
    text: str = ""
    messages: bytes = b""
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    submit: Submit | None = None  # then nothing else counts: what this request's prompt is
    template_kwargs: bytes = b""  # of a chat, as in Submit
    goes_on: bool = False  # its last message does


class Detokenize(Message, frozen=True):
    """/detokenize: ids to text, answered by `Detokenized`."""

    call_id: int
    tokens: bytes  # _i32


class Describe(Message, frozen=True):
    """/tokenizer_info, answered by `Detokenized`, whose text is a JSON object."""

    call_id: int


class TextBatch(Message, frozen=True):
    """New text of many sequences. Row j covers tokens first_index[j] .. first_index[j] + counts[j] - 1 of its output.

    A row may have tokens and no text (half a character, held back), or text and no tokens (what was held back).
    """

    seq_ids: bytes  # _u64
    first_index: bytes  # _i32
    counts: bytes  # _i32
    texts: list[str]
    finished: list[TextFinished]
    accepted: bytes = b""  # _u64: as in TokenBatch
    formats: list[TextFormat] = []
    ids: dict[int, tuple[int, bytes]] = {}  # of rows that want them, by seq_id: first_index, _i32 tokens
    engines: dict[int, int] = {}  # instances of the schedulers that now have these, by seq_id; 0 is not told at first
    logprobs: dict[int, TextLogprobs] = {}  # likewise
    prompt_logprobs: dict[int, TextLogprobs] = {}


class Refused(Message, frozen=True):
    """A request that was not accepted: the only terminal it gets. `seq_id` is its first choice or its call_id."""

    seq_id: int
    reason: str  # common.errors.RejectReason
    message: str
    param: str | None = None


class AbortNamed(Message, frozen=True):
    """API to its siblings: whoever has these requests ends them."""

    name: str  # that their client gave them, or got
    tenant: str


class Tokenized(Message, frozen=True):
    call_id: int
    tokens: bytes  # _i32
    token_strings: list[str] = []


class Detokenized(Message, frozen=True):
    call_id: int
    text: str


class Admit(Message, frozen=True):
    """An encoded request: n sequences seq_id .. seq_id + n - 1 that share one prompt. Idempotent by seq_id.

    For a new scheduler each open sequence is admitted by itself with its `output` so far; `sampling` counts all of it.
    With `origin`, a sequence that the scheduler knows goes on under the new id: all its output comes again, from 0 on.
    """

    seq_id: int
    tokens: bytes  # _i32: the prompt, at least one token
    sampling: Sampling
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    output: bytes = b""  # _i32
    origin: int = -1  # the sequence's first id, where another tokenizer admitted it before
    again: bool = False  # accepted before: never refused for load, and begins anew where it was aborted
    attach: bool = False  # only to go on with `origin`; a scheduler that does not know it answers Refused (not_found)
    tenant: str = ""
    weight: int = 1
    trace: str = ""
    logprobs: bytes = b""  # records of `output`, if its sampling wants any


class Stop(Message, frozen=True):
    seq_id: int  # ended by a stop string; the tokenizer has told the API already


class Pause(Message, frozen=True):
    """API to scheduler: the client of this sequence does not read; or it does again. Repeats change nothing."""

    seq_id: int
    paused: bool


class TokenBatch(Message, frozen=True):
    """One step's new tokens for one tokenizer: row j is output token first_index[j] of its sequence, before its end."""

    seq_ids: bytes  # _u64
    first_index: bytes  # _i32
    tokens: bytes  # _i32
    finished: list[Finished]
    accepted: bytes = b""  # _u64: first ids of requests that are not refused any more; with the next batch, or a beat
    logprobs: dict[int, TokenLogprobs] = {}  # of sequences that want them, by seq_id
    cached: dict[int, int] = {}  # with a sequence's first token: as in Finished, by seq_id


class StepPlan(Message, frozen=True):
    """One step, as differences to the rows the worker already holds. Applied in field order.

    Row j of the step runs tokens positions[j] .. positions[j] + counts[j] - 1 of slot slots[j]; where samples[j] is 1
    the last of them yields the row's next token, which the worker appends to the row itself. The first `drafting` rows
    begin with the row's newest token, wherever that is by now: at positions[j] at most; what follows it are drafts.
    """

    step: int
    removed: bytes = b""  # _i32 slots
    added: list[RowStart] = []
    grown_slots: bytes = b""  # _i32, may repeat a slot
    grown_blocks: bytes = b""  # _i32, appended to that slot's table
    copy_source: bytes = b""  # _i32 blocks, copied before the step runs
    copy_target: bytes = b""  # _i32 blocks
    slots: bytes = b""  # _i32
    positions: bytes = b""  # _i32
    counts: bytes = b""  # _i32
    samples: bytes = b""  # one byte per row
    grown: tuple[Growth, ...] = ()  # of groups behind the first one
    copies: tuple[Copies, ...] = ()  # of pools behind the first one
    drafting: int = 0


class StepResult(Message, frozen=True):
    """Sampled tokens of the rows with samples == 1, in the plan's order. A step with `error` sampled nothing.

    The device had no memory for the `failed` rows: their tokens mean nothing, and the worker computes nothing useful in
    them until they are removed.
    """

    step: int
    tokens: bytes  # _i32
    device_us: int = 0
    error: str = ""
    failed: bytes = b""  # _i32: places in the plan's rows
    counts: bytes = b""  # if the plan drafts, one byte per sampled row: its tokens, i.e. drafts that held, and one more
    drafted: bytes = b""  # likewise: drafts that were tried
    faults: list[RowFault] = []
    logprobs: StepLogprobs | None = None  # None: no row wants any


class WorkerReady(Message, frozen=True):
    """A real step has run, the worker holds no rows. Sent to each new scheduler until it shows the worker as ready."""

    model: ModelFacts
    max_rows: int


class Schedulers(Message, frozen=True):
    count: int  # that there shall be, instances 0 to count - 1; each tells everybody in its `Members`


class Control(Message, frozen=True):
    """API to all schedulers: what an administrator asks for. `log_level` and `profile` go on in `Members`."""

    flush: bool = False  # all cached prefixes are forgotten
    log_level: str = ""
    profile: bool | None = None


class StatusQuery(Message, frozen=True):
    reply_to: str  # where a `Status` is sent


class StoryQuery(Message, frozen=True):
    """The bounded event log of one sequence, answered by `Story` at `reply_to`."""

    reply_to: str
    seq_id: int


class Status(Message, frozen=True):
    members: list[Member]
    load: Load
    model: ModelFacts | None
    schedulers: int = 0  # as in Members


class Story(Message, frozen=True):
    lines: list[str]


ToApi = TextBatch | Refused | Tokenized | Detokenized | Members | AbortNamed
ToTokenizer = Submit | Abort | Tokenize | Detokenize | Describe | TokenBatch | Refused | Members
FromAdmin = StatusQuery | StoryQuery | Schedulers
ToScheduler = (
    Hello | Heartbeat | Goodbye | Admit | Stop | Abort | Pause | WorkerReady | StepResult | FromAdmin | Control
)
ToWorker = StepPlan | Members
ToAdmin = Status | Story
