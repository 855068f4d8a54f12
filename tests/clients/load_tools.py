"""guidellm and aiperf, whichever is installed, for three short requests each; see tests/clients/checks.py.

`python -m tests.clients.load_tools ADDRESS TOKENIZER`, TOKENIZER a folder with tokenizer.json, tokenizer_config.json,
and config.json of the served model, so that they need no hub. They read their own results here.
"""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.clients.checks import MODEL, run


def finish(*command: str) -> None:
    """The command, of this interpreter's environment, ends well."""
    path = Path(sys.executable).parent / command[0]
    done = subprocess.run([path, *command[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def guidellm(url: str) -> None:
    """/health first, then streaming chats with ignore_eos and continuous usage."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        how = ("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=3")
        made = ("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=4")
        read = ("--tokenizer", f"kind=hf_auto,model={sys.argv[2]}", "--output", f"kind=json,path={report}")
        backend = ("--backend", f"kind=openai_http,target={url}", "--disable-console-interactive")
        finish("guidellm", "run", *backend, *how, *made, *read)
        benchmark: Any = json.loads(report.read_text())["benchmarks"][0]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (3, 0), totals
    assert [request["output_tokens"] for request in benchmark["requests"]["successful"]] == [4, 4, 4]


def aiperf(url: str) -> None:
    """Streaming chats, and /metrics, where it takes vLLM's names."""
    with tempfile.TemporaryDirectory() as folder:
        how = ("--request-count", "3", "--concurrency", "2", "--workers-max", "1", "--ui", "none")
        made = ("--isl", "16", "--osl", "4", "--extra-inputs", "ignore_eos:true")
        read = ("--tokenizer", sys.argv[2], "--artifact-dir", folder)
        to = ("--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming")
        finish("aiperf", "profile", *to, *how, *made, *read)
        report: Any = json.loads(Path(folder, "profile_export_aiperf.json").read_text())
        assert "vllm:" in Path(folder, "server_metrics_export.csv").read_text()
    assert report["request_count"]["avg"] == 3 and not report["error_summary"], report["error_summary"]
    assert report["output_sequence_length"]["min"] == report["output_sequence_length"]["max"] == 4


def installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    ran = [run(check.__name__, check) for check in (guidellm, aiperf) if installed(check.__name__)]
    sys.exit(max(ran, default=2))
