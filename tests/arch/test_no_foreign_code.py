"""Nothing in the tree runs what it reads: no pickles, no eval, no shell. The few allowed places are named here."""

import ast
from collections.abc import Iterator

import pytest

from tests.arch.rules import nodes, parsed

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "shelve",
    "marshal",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "code",
    "codeop",
}
BUILTINS = {"eval", "exec", "compile", "__import__", "input"}
CALLS = {
    "os.system",
    "os.popen",
    "torch.load",
    "torch.hub.load",
    "torch.jit.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "pd.read_pickle",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
    "runpy.run_path",
    "imp.load_source",
    "importlib.machinery.SourceFileLoader",
    "importlib.util.spec_from_file_location",
}
PROCESSES = {
    "subprocess.run",
    "subprocess.Popen",
    "subprocess.call",
    "subprocess.check_call",
    "subprocess.check_output",
}
# Who starts other programs at all (always a list of words, never a shell), and who loads modules by name.
MAY_START = {
    "services/tokenizer/children.py",
    "services/worker/device_tools.py",
    "services/worker/prebuild.py",
    "services/worker/ranks.py",
    "services/worker/self_test.py",
    "valence/bootstrap.py",
    "valence/supervisor.py",
}
MAY_IMPORT_BY_NAME = {
    "services/api/route.py",
    "services/worker/compile.py",
    "services/worker/kernels/impl/aiter/_host.py",
    "services/worker/kernels/registry.py",
    "services/worker/models/registry.py",
    "services/worker/quant/catalog.py",
    "services/worker/kernels/impl/aiter/_prebuild.py",
    "services/worker/kernels/trial.py",
}
MAY_RUN_MODULES = {"valence/__main__.py", "valence/launch.py"}
MAY_LOAD_LIBRARIES = {
    "services/worker/kernels/impl/numba/_team.py",
    "services/worker/rank_child.py",
    "services/worker/self_test_child.py",
    "valence/launch.py",
}
MAY_TRUST_REMOTE_CODE = {"common/tokenizer_files.py"}


def dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def findings(name: str, tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"{name}:{node.lineno} imports {module}" for module in named if module.split(".")[0] in MODULES)
        if isinstance(node, ast.Call):
            yield from (f"{name}:{node.lineno} {what}" for what in call_findings(name, node))


def call_findings(name: str, node: ast.Call) -> Iterator[str]:
    called = dotted(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if called in BUILTINS or called in CALLS:
        yield f"calls {called}"
    if isinstance(shell := keywords.get("shell"), ast.Constant) and shell.value:
        yield f"calls {called} with a shell"
    if "trust_remote_code" in keywords and name not in MAY_TRUST_REMOTE_CODE:
        yield f"calls {called} with trust_remote_code"
    places = [
        (called in PROCESSES or called.startswith(("os.spawn", "os.exec", "os.posix_spawn")), MAY_START),
        (called == "importlib.import_module", MAY_IMPORT_BY_NAME),
        (called.startswith("runpy."), MAY_RUN_MODULES),
        (called.startswith("ctypes.CDLL"), MAY_LOAD_LIBRARIES),
    ]
    for found, allowed in places:
        if found and name not in allowed:
            yield f"calls {called}"


def test_nothing_runs_what_it_reads() -> None:
    trees = parsed("common", "services", "valence")
    assert [finding for name, tree, _ in trees for finding in findings(name, tree)] == []


def test_the_named_places_still_need_it() -> None:
    """A place that needs it no longer is taken off the list."""
    for allowed, words in (
        (MAY_START, "subprocess."),
        (MAY_IMPORT_BY_NAME, "importlib.import_module("),
        (MAY_RUN_MODULES, "runpy."),
        (MAY_LOAD_LIBRARIES, "ctypes.CDLL("),
        (MAY_TRUST_REMOTE_CODE, "trust_remote_code="),
    ):
        texts = {name: text for name, _, text in parsed("common", "services", "valence")}
        assert {name for name in allowed if words in texts.get(name, "")} == allowed


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from yaml import load",
        "import _pickle as p",
        "eval('1')",
        "exec(open('x').read())",
        "torch.load('x')",
        "np.load('x', allow_pickle=True)",
        "os.system('ls')",
        "subprocess.run(['ls'])",
        "subprocess.run('ls', shell=True)",
        "importlib.import_module(name)",
        "runpy.run_path('x')",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "ctypes.CDLL('x')",
    ],
)
def test_each_is_found(code: str) -> None:
    assert list(findings("common/x.py", ast.parse(code)))
