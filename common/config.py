"""The configuration: one frozen tree, the same for every service and the command line.

Sources, later ones win: defaults, a TOML file, `--set a.b=c`. An unknown key is an error that names the nearest known
one. Facts found at run time (KV blocks, model limits) are messages, never written here.
"""

import difflib
import hashlib
import tempfile
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.errors import ConfigError

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Replicas = Annotated[int, Meta(ge=1, le=64)]


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of the file."""


class Model(Branch, frozen=True):
    source: str = "bundled"  # folder, .gguf file, hub id, or "bundled"
    name: str = ""  # name in the API; empty: taken from the source
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # float32 is the exact mode
    weights: Literal["checkpoint", "random"] = "checkpoint"  # random: only the configuration is read, to measure speed
    max_len: NonNegative = 0  # tokens of prompt and output; 0: the model's own limit
    trust_remote_code: bool = False
    tool_parser: str = (
        "auto"  # dialect of tool calls (docs/api.md); auto: by template and config.json; none: plain text
    )
    reasoning_parser: str = "auto"  # likewise, of reasoning
    # Of /v1/embeddings, where a request does not say; auto: as the checkpoint's files do, else last and on.
    pooling: Literal["auto", "last", "mean"] = "auto"
    normalize: Literal["auto", "on", "off"] = "auto"  # vectors have length 1
    matryoshka: bool = False  # any first part of a vector is one, also where config.json does not say so


class Kv(Branch, frozen=True):
    block_tokens: Annotated[int, Meta(ge=1, le=256)] = 16
    blocks: NonNegative = 0  # 0: from the memory budget
    memory_gib: Annotated[float, Meta(ge=0)] = 0.0  # budget; 0: what the GPU has left, or a share of a CPU's memory
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.92  # of the GPU's memory, for everything together
    # auto: as activations; fp8: 8-bit floats (e4m3), a scale per layer or one for each token and head
    dtype: Literal["auto", "fp8", "fp8_per_token_head"] = "auto"
    prefix_cache: bool = True
    share_prefix_across_tenants: bool = False  # True: hits, and so response times, tell what others have asked
    checkpoint_tokens: NonNegative = 0  # from one to the next of a recurrent state's; 0: by their bytes
    events_endpoint: str = ""  # where KV events are published, as tcp://*:5557; scheduler i: port + i; empty: nowhere
    events_replay_endpoint: str = ""  # where subscribers ask for what they have missed; empty: nowhere
    events_topic: str = ""
    events_buffer: Positive = 10_000  # batches of events that are kept for replays, of 64 MiB at most


class Scheduler(Branch, frozen=True):
    policy: Literal["decode_first", "prefill_first"] = "decode_first"
    max_rows: Annotated[int, Meta(ge=1, le=4096)] = 256  # sequences that run at once
    step_tokens: Positive = 2048  # token budget of one step
    chunk_tokens: NonNegative = 0  # longest prefill chunk; 0: the whole budget
    max_waiting: Positive = 4096  # sequences
    plans_in_flight: Annotated[int, Meta(ge=1, le=8)] = 2
    max_worker_deaths: Positive = 2  # a request that was running in so many is ended
    step_deadline_s: NotNegative = 0.0  # a worker that is silent about a step for so long is replaced; 0: as measured
    max_waiting_tokens: NonNegative = 0  # prompt tokens in the queue; 0: 512 times step_tokens
    priority_ageing_s: NotNegative = 30.0  # waiting so long counts as one level of priority; 0: priorities are absolute
    # Chunks beside rows that decode cost at most what as many tokens cost after so many others; 0: no such limit.
    chunk_context: NonNegative = 16_384
    # Tokens of chunks beside rows that decode; more while many sequences wait, as policy.py says; 0: the whole budget.
    chunk_beside: NonNegative = 768


class Worker(Branch, frozen=True):
    kind: Literal["model", "null"] = "model"
    device: Literal["auto", "cpu", "cuda", "cuda:0"] = "auto"  # cuda:0: the first GPU, whatever the replica's number
    threads: NonNegative = 0  # CPU threads of the kernels; 0: all cores, divided among configured replicas and ranks
    kernels: tuple[str, ...] = ("aiter", "triton", "numba", "torch")  # providers, first choice first
    compile_level: Annotated[int, Meta(ge=-1, le=3)] = -1  # 0 eager, 1 dynamo, 2 inductor, 3 and graphs; -1: 3 on a GPU
    max_graph_rows: Annotated[int, Meta(ge=0, le=4096)] = 512  # largest decode batch that is captured
    cache_dir: str = ""  # compiled kernels; empty: a folder of this user
    step_us: NonNegative = 0  # null worker: time of one step
    self_test: Literal["auto", "on", "off"] = "auto"  # kernels against torch, before they serve; auto: on AMD GPUs
    self_test_s: Seconds = 120.0  # a kernel that gives no sign of life for so long has failed its test
    near_cpus: bool = True  # runs on the CPUs of the GPU's own NUMA node only
    tensor_parallel: Annotated[int, Meta(ge=1, le=8)] = 1  # ranks of each worker: a model divided among so many GPUs
    null_echo: Annotated[
        int, Meta(ge=-1)
    ] = -1  # null worker: answers what is between the prompt's last two of this token
    quantize: Literal["", "fp8", "fp8_block", "mxfp4", "int8", "int4"] = ""  # what weights are converted to at load


class Speculative(Branch, frozen=True):
    method: Literal["", "ngram", "draft", "mtp"] = ""  # who proposes tokens to be verified; empty: nobody
    tokens: Annotated[int, Meta(ge=0, le=8)] = 0  # drafts of a row in a step, at most; 0: 1 for mtp, else 4
    ngram_min: Annotated[int, Meta(ge=1, le=16)] = 2  # ngram: what was found again has at least so many tokens
    ngram_max: Annotated[int, Meta(ge=1, le=16)] = 4
    model: str = ""  # draft: the smaller model of the same vocabulary, named as model.source
    max_rows: Positive = 64  # no drafts in larger steps; below, they are off where they cost more than they save

    @property
    def drafts(self) -> int:
        """Drafts of a row in a step, at most; 0 without a method."""
        if not self.method:
            return 0
        return self.tokens or (1 if self.method == "mtp" else 4)


class Api(Branch, frozen=True):
    host: str = "127.0.0.1"
    port: Port = 8000
    keys_file: str = ""  # written by `valence keys`; empty: nobody needs a key, unless VALENCE_API_KEYS has some
    deadline_s: NotNegative = 0.0  # from a request's arrival to its end, unless it says otherwise; 0: none
    max_deadline_s: NotNegative = 0.0  # the longest that a request can have; 0: any, also none
    max_open_requests: Positive = 1024  # per replica; more are answered 429
    max_header_bytes: Annotated[int, Meta(ge=256)] = 32 * 1024  # request line and headers; more are answered 431
    max_header_s: Seconds = 10.0  # from a connection or the first byte of a request to the end of its headers
    max_body_bytes: Positive = 8 * 1024 * 1024
    max_body_s: Seconds = 60.0  # for the whole body to come
    cors_origins: tuple[str, ...] = ()  # of web pages that may call the API; "*": all; none: CORS is off
    max_choices: Annotated[int, Meta(ge=1, le=1024)] = 128  # n of one request, times its prompts
    max_buffered_events: Positive = 4096  # per stream, before the request of a slow client is paused
    retry_after_s: Positive = 1  # the least that a Retry-After says
    max_retry_after_s: Positive = 60  # and the most
    max_held_bytes: Positive = 256 * 1024 * 1024  # bodies of open requests, per replica; more are answered 429
    slow_client_s: Seconds = 30.0  # how long a client may leave a full buffer unread
    drain_lag_s: NotNegative = 0.0  # after SIGTERM: still serves, no longer ready, until load balancers have noticed
    admin_host: str = "127.0.0.1"
    admin_port: Port = 0  # administrative routes; replica N listens at the port plus N; 0: they are nowhere
    admin_on_main: bool = False  # administrative routes at host:port, too
    metrics: Literal["main", "admin", "both"] = "both"  # where GET /metrics is
    max_messages: Positive = 2048  # of one chat
    door: bool = False  # listen by sockets of `python -m services.api.door`, which alone needs a network
    storage_dir: str = ""  # files and batches of users; empty: a folder of this user's data, by port
    max_file_bytes: Positive = 200 * 1024 * 1024  # of one file; more is answered 413
    storage_bytes: Positive = 20 * 1024 * 1024 * 1024  # of all files together
    batch_requests: Positive = 64  # requests of batches that a replica has open at once
    max_batch_requests: Positive = 50_000  # of one batch
    max_batches: Positive = 100  # of one API key that have not ended
    max_responses: Positive = 10_000  # of one API key that are kept: the oldest go
    response_bytes: Positive = 1024 * 1024 * 1024  # of them all, likewise
    response_age_s: Seconds = 30 * 24 * 3600.0  # how long a response is kept
    max_logprobs: Annotated[int, Meta(ge=0, le=256)] = 20  # most probable tokens that come with each


class Tokenizer(Branch, frozen=True):
    threads: Annotated[int, Meta(ge=1, le=64)] = 1  # encode pool
    max_template_chars: Positive = 4_000_000  # rendered prompt
    max_template_s: Seconds = 2.0  # processor time of the chat template on one prompt
    max_grammar_s: Seconds = 1.0  # processor time of preparing what one request's output must match


class Replicated(Branch, frozen=True):
    replicas: Replicas = 1


class Services(Branch, frozen=True):
    api: Replicated = Replicated()
    tokenizer: Replicated = Replicated()
    worker: Replicated = Replicated()  # each a group of its own: of n ranks, worker i has n GPUs from the i * n-th on
    scheduler: Replicated = Replicated()  # each with the workers whose number leaves its own as the remainder


class Links(Branch, frozen=True):
    run_dir: str = ""  # sockets, logs, supervisor; empty: a folder of this user and port under the temporary folder
    transport: Literal["ipc", "tcp"] = "ipc"
    host: str = "127.0.0.1"  # tcp: address to bind
    scheduler_port: Port = 5570  # tcp: the well-known address of scheduler 0; scheduler i has the port i further on
    queue: Positive = 20_000  # messages per link before sends are refused
    heartbeat_s: Seconds = 0.5
    dead_after_s: Seconds = 5.0
    drain_s: Seconds = 20.0
    recover_s: Seconds = 30.0  # how long requests wait for a tokenizer when theirs has gone
    stalled_after_s: Seconds = 60.0  # work waits and none is done for so long: not healthy
    keys_dir: str = ""  # tcp: keys, made by `valence keys links init`; needed unless `host` is a loopback address
    insecure_tcp: bool = False  # tcp beyond this host without keys: whoever reaches the ports owns the server


class Traces(Branch, frozen=True):
    endpoint: str = ""  # of a collector, for OTLP over HTTP, as http://127.0.0.1:4318/v1/traces; empty: no traces
    ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of the requests whose callers do not say whether to trace them


class Log(Branch, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Config(Branch, frozen=True):
    model: Model = Model()
    kv: Kv = Kv()
    scheduler: Scheduler = Scheduler()
    worker: Worker = Worker()
    api: Api = Api()
    tokenizer: Tokenizer = Tokenizer()
    services: Services = Services()
    links: Links = Links()
    log: Log = Log()
    speculative: Speculative = Speculative()
    traces: Traces = Traces()

    @property
    def run_dir(self) -> Path:
        return Path(self.links.run_dir or default_run_root() / str(self.api.port))


def default_run_root() -> Path:
    """Folder that holds one run directory per port of this user."""
    return Path(tempfile.gettempdir()) / f"valence-{Path.home().name}"


def load(path: str | Path | None = None, settings: list[str] | None = None) -> Config:
    """Reads the file at `path` (if given), then applies `a.b=c` settings.

    Values of settings are TOML where they parse as TOML and plain strings otherwise.
    Raises ConfigError with the key at fault and, for an unknown key, the nearest known one.
    """
    tree: dict[str, Any] = {}
    if path:
        try:
            tree = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: {error}") from error
    for setting in settings or []:
        _apply(tree, setting)
    _check_keys(tree, Config, "")
    try:
        return msgspec.convert(tree, Config, strict=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ConfigError(str(error).replace("$.", "")) from error


def _apply(tree: dict[str, Any], setting: str) -> None:
    key, separator, text = setting.partition("=")
    if not separator or not key:
        raise ConfigError(f"a setting is written a.b=c, not {setting!r}")
    if not setting.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in setting):
        raise ConfigError(f"a setting must be valid Unicode, not {setting!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text
    *parents, leaf = key.split(".")
    branch = tree
    for parent in parents:
        branch = branch.setdefault(parent, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"{key}: {parent} is no table")
    branch[leaf] = value


def _check_keys(tree: dict[str, Any], branch: type[Branch], prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(branch)}
    for name, value in tree.items():
        if name not in fields:
            near = difflib.get_close_matches(prefix + name, keys(), n=1, cutoff=0.0)
            raise ConfigError(f"unknown key {prefix}{name}; the nearest known key is {near[0]}")
        kind = fields[name]
        if isinstance(kind, type) and issubclass(kind, Branch):
            if not isinstance(value, dict):
                raise ConfigError(f"{prefix}{name} is a table, not a value")
            _check_keys(value, kind, f"{prefix}{name}.")


def keys(branch: type[Branch] = Config, prefix: str = "") -> list[str]:
    """All keys, dotted, in order."""
    found: list[str] = []
    for field in msgspec.structs.fields(branch):
        if isinstance(field.type, type) and issubclass(field.type, Branch):
            found += keys(field.type, f"{prefix}{field.name}.")
        else:
            found.append(prefix + field.name)
    return found


def render(config: Config) -> str:
    """The resolved tree as TOML; `load` of this text gives the same tree."""
    lines: list[str] = []
    for key in keys():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        lines.append(f"{key} = {msgspec.json.encode(value).decode()}")
    return "\n".join(lines) + "\n"


def fingerprint(config: Config) -> str:
    """Short hash of the resolved tree, to notice processes that run with different settings.

    Numbers of replicas are left out: they change while the system runs.
    """
    same = msgspec.structs.replace(config, services=Services())
    return hashlib.blake2b(render(same).encode(), digest_size=6).hexdigest()
