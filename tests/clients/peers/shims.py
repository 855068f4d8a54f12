"""A pytest plugin: lets the test suites of other servers meet a running Valence. Loaded by `tests.clients.peers`.

None of their code is here. What a suite's tests import of its own server is replaced: what starts one starts Valence,
what is a tokenizer is the bundled model's, and whatever else is called ends the test as not applicable. So end those
that `not_applicable.toml` names, by suite, with the reason.
"""

import fnmatch
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from benchmarks.system import System
from common.model_source import resolve
from common.tokenizer_files import open_tokenizer

SUITE = os.environ["PEER_SUITE"]
CHECKOUT = Path(os.environ["PEER_CHECKOUT"])
REASONS: dict[str, str] = tomllib.loads(Path(__file__).with_name("not_applicable.toml").read_text())[SUITE]
BUNDLED = "SmolLM2-135M-Instruct"
SETTINGS = ("model.dtype=float32", "kv.blocks=2048", "scheduler.max_rows=32", "links.dead_after_s=120")
CONTEXT = 8192  # the bundled model's
LONGEST = 1400  # tokens of prompt and output, where a suite does not say
CHUNKS = "assert_chat_completions_stream_return"
# Tokens of an answer where a test sets no limit: a model this small may never end by itself.
UNASKED = int(os.environ.get("PEER_UNASKED", "48"))
UNASKED_JSON = 256  # of one that is a whole only where it ends


def serve(*settings: str) -> System:
    return System(f"model.source={os.environ['PEER_MODEL']}", *SETTINGS, *settings)


class Absent(type):
    """The class of what stands for the peer's own code: it can be named, inherited and indexed, not called."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "PYTEST_CURRENT_TEST" not in os.environ:  # a module is being read
            return Absent("made", (), {"__module__": f"{cls.__module__}.{cls.__name__}"})
        pytest.skip(f"not applicable: {cls.__module__}.{cls.__name__} is the peer's Python, not its HTTP")

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name, (), {"__module__": f"{cls.__module__}.{cls.__name__}"})


class AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name, (), {"__module__": self.__name__})


class Absentees(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of a package that is not installed, empty."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        inside = name.split(".")[0] == self._package
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def tokenizer(*_args: Any, **_kwargs: Any) -> Any:
    """The bundled model's, whatever model is named."""
    from transformers import PreTrainedTokenizerFast

    opened = open_tokenizer(resolve("bundled"), False)
    made = PreTrainedTokenizerFast(tokenizer_object=opened.tokenizer, **opened.specials)
    made.chat_template = next(iter(opened.templates.values()), None)
    return made


class Server:
    """In the place of vLLM's `RemoteOpenAIServer`: its names, and a Valence that says it serves the model asked for."""

    DUMMY_API_KEY = "none"
    READ: ClassVar = {"--max-model-len": "model.max_len", "--served-model-name": "model.name"}
    REFUSED: ClassVar = {
        "--root-path": "a prefix of routes is a proxy's matter",
        "--skip-tokenizer-init": "a server without a tokenizer process",
        "--runner": "pooling models",
        "--limit-mm-per-prompt": "images",
        "--watermark-config": "watermarks",
        "--return-sampling-mask": "masks of sampling in answers",
        "--return-tokens-as-token-ids": "an option of vLLM's start; the request's field is tested",
    }

    def __init__(self, model: str, args: Sequence[str], **_more: Any) -> None:
        named = dict(zip(args, [*args[1:], ""], strict=True))
        if "/SmolVLM" in model:
            pytest.skip("not applicable: another model, of images")
        if int(named.get("--max-model-len", 0)) > CONTEXT:
            pytest.skip("not applicable: a longer context than the bundled model's")
        for flag in self.REFUSED.keys() & named.keys():
            pytest.skip(f"not applicable: {flag}: {self.REFUSED[flag]}")
        settings = {"model.name": model, "model.max_len": str(LONGEST)}
        settings |= {key: named[flag] for flag, key in self.READ.items() if flag in named}
        settings["model.max_len"] = str(min(int(settings["model.max_len"]), CONTEXT))
        if "--tool-call-parser" in named:
            settings["model.tool_parser"] = "hermes"
        if "--reasoning-parser" in named:
            settings["model.reasoning_parser"] = "think"
        self._system = serve(*(f"{key}={value}" for key, value in settings.items()))
        self.host, self.port, self.url_root = "127.0.0.1", self._system.port, self._system.url
        self.uds, self.show_hidden_metrics = None, False

    def __enter__(self) -> "Server":
        self._system.__enter__()
        return self

    def __exit__(self, *_raised: Any) -> None:
        self._system.end()

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(**self._client(self.url_for("v1"), options))

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._client(self.url_for("v1"), options))

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(**self._client(self.url_root, options))

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**self._client(self.url_root, options))

    def _client(self, url: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": url, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 300} | options


def stand_in_vllm() -> None:
    """Its tests start servers of their own, and import much of it."""
    _limit_answers()
    sys.meta_path.insert(0, Absentees("vllm"))
    stand_ins = AbsentModule("tests.utils")
    stand_ins.__dict__.update(RemoteOpenAIServer=Server, ROCM_EXTRA_ARGS=[], ROCM_ENV_OVERRIDES={})
    for mark in ("multi_gpu_only", "requires_fp8", "create_new_process_for_each_test", "multi_gpu_test"):
        stand_ins.__dict__[mark] = lambda *args, **_more: args[0] if args and callable(args[0]) else lambda test: test
    fixtures = AbsentModule("tests.conftest")
    fixtures.__dict__.update(__file__=str(CHECKOUT / "tests/conftest.py"), pytest_plugins=[])
    sys.modules |= {"tests.utils": stand_ins, "tests.conftest": fixtures}
    tokenizers = importlib.import_module("vllm.tokenizers")
    hub = importlib.import_module("vllm.transformers_utils.repo_utils")
    platforms = importlib.import_module("vllm.platforms")
    importlib.import_module("vllm.version").__dict__.update(_prev_minor_version=lambda: "", __version__="")
    tokenizers.__dict__["get_tokenizer"] = tokenizer
    importlib.import_module("transformers").AutoTokenizer.from_pretrained = tokenizer
    hub.__dict__["hf_api"] = lambda: type("Hub", (), {"snapshot_download": staticmethod(lambda **_: "")})
    platforms.__dict__["current_platform"] = type("Cpu", (), {"is_rocm": staticmethod(lambda: False)})


def stand_in_lmdeploy() -> None:
    """Its tests want a server that runs, the client of its own package, and a matrix of models to run against."""
    os.environ["LMDEPLOY_PORT"] = str(system("model.max_len=4096").port)  # they ask for 2,048 tokens
    for place in (CHECKOUT / "autotest", CHECKOUT):
        sys.path.insert(0, str(place))
    path = CHECKOUT / "lmdeploy/serve/openai/api_client.py"
    sys.meta_path.insert(0, Absentees("lmdeploy"))
    importlib.import_module("lmdeploy.utils").__dict__["get_logger"] = __import__("logging").getLogger
    spec = importlib.util.spec_from_file_location("lmdeploy.serve.openai.api_client", path)
    assert spec is not None and spec.loader is not None, path
    client = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(client)
    client.__dict__["APIClient"].encode = _encode  # its own route for it is /v1/encode
    client.__dict__["APIClient"].completions_v1 = _with_booleans(client.__dict__["APIClient"].completions_v1)
    parser = importlib.import_module("lmdeploy.serve.parsers.response_parser")
    parser.__dict__["_parse_tool_call_arguments_dict"] = _arguments
    for name in ("utils.ascend_multinode_utils", "utils.proxy_distributed_utils", "utils.ray_distributed_utils"):
        sys.modules[name] = AbsentModule(name)
    constant = importlib.import_module("utils.constant")
    constant.__dict__["BACKEND_LIST"] = ["valence"]
    for name in ("RESTFUL_MODEL_LIST", "RESTFUL_BASE_MODEL_LIST", "TOOL_REASONING_MODEL_LIST"):
        constant.__dict__[name] = [BUNDLED]
    constant.__dict__["DEFAULT_MAX_COMPLETION_TOKENS"] = 256
    importlib.import_module("utils.toolkit").__dict__["_load_tokenizer_cached"] = tokenizer
    checks = importlib.import_module("utils.restful_return_check")
    checks.__dict__[CHUNKS] = _as_lmdeploy_tells(checks.__dict__[CHUNKS])


def _as_lmdeploy_tells(check: Any) -> Any:
    """Its chunks all have a role and content; OpenAI's, and ours, the first one and those with text."""

    def checked(output: Any, *args: Any, **kwargs: Any) -> None:
        for choice in output.get("choices") or ():
            told = {key: value for key, value in (choice["delta"] or {}).items() if value is not None}
            choice["delta"] = {"role": "assistant", "content": ""} | told
        check(output, *args, **kwargs)

    return checked


def _with_booleans(ask: Any) -> Any:
    """Its tests say "true", which its server takes; OpenAI's, and ours, refuses a text there."""

    def asked(*args: Any, stream: Any = False, **kwargs: Any) -> Any:
        return ask(*args, stream=stream in (True, "true"), **kwargs)

    return asked


def _arguments(text: str) -> dict[str, Any]:
    """Of a call. Raises ValueError."""
    told = json.loads(text)
    if not isinstance(told, dict):
        raise ValueError(f"no object: {text}")
    return told


def _encode(_client: Any, text: str, **_options: Any) -> tuple[list[int], int]:
    ids = tokenizer().encode(text, add_special_tokens=False)
    return ids, len(ids)


def stand_in_llama() -> None:
    """Its tests have a mode for a server that runs already. They say any model's name, leave `/v1` out, and know what
    the model of their server says, which is not ours."""
    os.environ.update(DEBUG_EXTERNAL="1", PORT=str(system("model.name=tinyllama-2").port))
    sys.path.insert(0, str(Path.cwd()))
    utils = importlib.import_module("utils")
    utils.__dict__["match_regex"] = lambda _pattern, text: isinstance(text, str)
    for name in ("make_request", "make_stream_request"):
        setattr(utils.ServerProcess, name, _as_ours(getattr(utils.ServerProcess, name)))
    _limit_answers("tinyllama-2")


def _as_ours(ask: Any) -> Any:
    def asked(self: Any, method: str, path: str, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if path.split("/")[1] in ("chat", "completions", "models", "responses"):
            path = "/v1" + path
        if isinstance(data, dict) and isinstance(data.get("model"), str):
            data = data | {"model": "tinyllama-2"}
        return ask(self, method, path, data, *args, **kwargs)

    return asked


def _limit_answers(model: str = "") -> None:
    """OpenAI's client asks for no more than UNASKED tokens where a test sets no limit; always for this `model`."""
    from openai.resources import chat, completions, responses

    def limited(create: Any, limits: tuple[str, ...]) -> Any:
        def created(*args: Any, **kwargs: Any) -> Any:
            own = (
                {}
                if any(limit in kwargs for limit in limits)
                else {limits[0]: UNASKED_JSON if "response_format" in kwargs else UNASKED}
            )
            return create(*args, **kwargs | own | ({"model": model} if model else {}))

        return created

    for kind in (chat.completions.Completions, chat.completions.AsyncCompletions):
        kind.create = limited(kind.create, ("max_completion_tokens", "max_tokens"))
    for kind in (completions.Completions, completions.AsyncCompletions):
        kind.create = limited(kind.create, ("max_tokens",))
    for kind in (responses.Responses, responses.AsyncResponses):
        kind.create = limited(kind.create, ("max_output_tokens",))


@pytest.fixture
def local_asset_server() -> None:
    """vLLM's, of images."""


RUNNING: list[System] = []


def system(*settings: str) -> System:
    longest = (f"model.max_len={LONGEST}", "model.tool_parser=hermes")
    RUNNING.append(serve(*longest, *settings).__enter__())
    return RUNNING[-1]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    {"vllm": stand_in_vllm, "lmdeploy": stand_in_lmdeploy, "llama.cpp": stand_in_llama}[SUITE]()


def pytest_unconfigure(config: pytest.Config) -> None:
    for each in RUNNING:
        each.end()


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in REASONS.items():
            if fnmatch.fnmatchcase(item.nodeid.replace("[", "("), "*" + pattern.replace("[", "(") + "*"):
                item.add_marker(pytest.mark.skip(f"not applicable: {reason}"))


class Teller:
    """Tells failures at once: a suite takes long."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.write_line(f"\nFAILED {report.nodeid}\n{report.longreprtext[-1500:]}")


@pytest.hookimpl(trylast=True)  # the reporter has come by then
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Teller(config.pluginmanager.get_plugin("terminalreporter")))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each file: passed, failed, not applicable."""
    counts: dict[str, dict[str, int]] = {}
    for outcome, column in (("passed", "passed"), ("failed", "failed"), ("error", "failed"), ("skipped", "n/a")):
        for report in terminalreporter.stats.get(outcome, ()):
            row = counts.setdefault(report.nodeid.partition("::")[0], {"passed": 0, "failed": 0, "n/a": 0})
            row[column] += 1
    terminalreporter.section(f"{SUITE} against Valence")
    for name, row in sorted(counts.items()):
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{count} {column}" for column, count in row.items()))
