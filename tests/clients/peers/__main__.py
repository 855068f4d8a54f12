"""Test suites of other servers against Valence: `python -m tests.clients.peers SUITE CHECKOUT [options of pytest]`.

`SUITE` is vllm, lmdeploy or llama.cpp and `CHECKOUT` its source tree (vLLM's and llama-cpp-python's sdists have the
tests, too). docs/conformance.md has the results and says what to install. Exit status: pytest's, 0 if nothing failed.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OPENAI = "tests/entrypoints/openai"
SUITES = {  # where pytest runs, and what of the suite speaks to a server over HTTP about text
    "vllm": (
        ".",
        f"{OPENAI}/chat_completion/test_chat.py",
        f"{OPENAI}/chat_completion/test_chat_completion.py",
        f"{OPENAI}/chat_completion/test_chat_echo.py",
        f"{OPENAI}/chat_completion/test_chat_logit_bias_validation.py",
        f"{OPENAI}/chat_completion/test_completion_with_function_calling.py",
        f"{OPENAI}/chat_completion/test_logprob_token_ids.py",
        f"{OPENAI}/completion/test_completion.py",
        f"{OPENAI}/models/test_models.py",
        f"{OPENAI}/responses/test_simple.py",
        f"{OPENAI}/test_chunked_prompt.py",
        f"{OPENAI}/test_return_token_ids.py",
        f"{OPENAI}/test_return_tokens_as_ids.py",
        "tests/entrypoints/anthropic/test_messages.py",
        "tests/entrypoints/scale_out/token_in_token_out/test_serving_tokens.py",
        "tests/entrypoints/serve/instrumentator/test_basic.py",
        "tests/entrypoints/serve/instrumentator/test_metrics.py",
        "tests/entrypoints/serve/tokenize/test_tokenization.py",
    ),
    "lmdeploy": (
        ".",
        "autotest/interface/restful/test_restful_chat_completions_v1.py",
        "autotest/interface/restful/test_restful_completions_v1.py",
        "autotest/interface/restful/test_restful_anthropic_v1.py",
        "autotest/interface/restful/test_restful_anthropic_sdk_messages.py",
        "autotest/interface/restful/tool_parser/test_tool_call_basic.py",
        "autotest/interface/restful/tool_parser/test_tool_call_advanced.py",
        "autotest/interface/restful/tool_parser/test_tool_call_anthropic_sdk.py",
    ),
    "llama.cpp": (
        "tools/server/tests",
        "unit/test_chat_completion.py",
        "unit/test_compat_anthropic.py",
        "unit/test_compat_oai_responses.py",
        "unit/test_completion.py",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--model", help="a folder; else the bundled model. small_model.py writes one that is quick")
    options, more = parser.parse_known_args()
    place, *files = SUITES[options.suite]
    chosen = [word for word in more if ".py" in word and " " not in word]
    asked = [*(chosen or files), *(word for word in more if word not in chosen)]
    # The shims are loaded as a module of their own: `tests` is the suite's package there.
    found = {
        "PYTHONSAFEPATH": "1",  # vLLM's tree has a package `benchmarks`, too
        "PYTHONPATH": os.pathsep.join((str(FOLDER), str(FOLDER.parents[2]))),
        "PEER_SUITE": options.suite,
        "PEER_CHECKOUT": str(options.checkout.resolve()),
        "PEER_MODEL": options.model or "bundled",
    }
    options_of_pytest = ("-p", "shims", "-p", "no:cacheprovider", "-v", "-rs", "--tb=short")
    command = [sys.executable, "-m", "pytest", *options_of_pytest, *asked]
    return subprocess.run(command, cwd=options.checkout / place, env=os.environ | found, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
