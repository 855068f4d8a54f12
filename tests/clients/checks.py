"""What the scripts of clients share: their one argument, a running server's address, and how checks are told.

Each script runs in an environment of its own, with its client and nothing of Valence's, from the repository's root:
`python -m tests.clients.openai_sdk http://127.0.0.1:8000`. The server has the bundled model and
`model.tool_parser=hermes`, since that model's template names no dialect of tool calls.
"""

import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version

MODEL = "SmolLM2-135M-Instruct"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def run(package: str, *checks: Callable[[str], None]) -> int:
    """Exit status: 1 if a check failed. Each takes the server's address without a path."""
    if len(sys.argv) < 2:
        print(f"usage: python -m tests.clients.<client> http://127.0.0.1:8000, not {sys.argv[1:]}", file=sys.stderr)
        return 2
    failed = 0
    for check in checks:
        try:
            check(sys.argv[1].rstrip("/"))
        except Exception:  # noqa: BLE001 - whatever a client raises is its finding, and the others still run
            failed += 1
            print(f"FAILED {check.__name__}\n{traceback.format_exc(limit=-2)}")
        else:
            print(f"passed {check.__name__}", flush=True)
    client = f"{package} {version(package)}" if package else "raw HTTP"
    print(f"{client}: {len(checks) - failed} of {len(checks)} passed")
    return 1 if failed else 0
