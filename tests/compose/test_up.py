"""`docker compose up` with a real daemon and no GPU: it serves, is scaled, restarted under streams, and leaves nothing.

Run by `make test-compose`; minutes, most of them for the images. The tests build on each other, in their order.
"""

import concurrent.futures
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.compose import daemon
from tests.compose.composefile import CPU, ROOT
from tests.ports import free_port

MODEL = "SmolLM2-135M-Instruct"
STREAMS = 16
TOKENS = 32
READY_S = 300.0
# Exact, so that a moved stream goes on as it was; and a starved machine may take its time to finish what is open.
SETTINGS = "model.dtype=float32 kv.memory_gib=0.5 scheduler.max_rows=64 links.drain_s=240 api.slow_client_s=240"


class Stack:
    """One `docker compose` project of its own name and port."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.project = f"valence-test-{os.getpid()}"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        environment |= {"PORT": str(self.port), "SET": SETTINGS, "MODEL": "bundled", "STOP_GRACE": "250s"}
        files = ["-f", str(ROOT / "compose.yaml"), "-f", str(CPU), "--project-directory", str(ROOT)]
        self._compose = [*daemon.compose(environment), *files, "-p", self.project]

    def compose(self, *arguments: str) -> str:
        return daemon.run(*self._compose, *arguments, env=self.environment).stdout

    def docker(self, *arguments: str) -> str:
        return daemon.run("docker", *arguments, env=self.environment).stdout

    def containers(self, service: str = "", every: bool = False) -> list[str]:
        """Ids, of one service or of all."""
        labels = [f"com.docker.compose.project={self.project}"]
        labels += [f"com.docker.compose.service={service}"] if service else []
        filters = [option for label in labels for option in ("--filter", f"label={label}")]
        return self.docker("ps", "-q", *(["-a"] if every else []), *filters).split()

    def inspect(self, container: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", container))
        return found[0]

    def execute(self, service: str, *command: str) -> str:
        return self.docker("exec", self.containers(service)[0], *command)

    def send(self, container: str, module: str, number: int) -> None:
        """A signal to the service's process in a container, from inside; process 1 is Docker's init."""
        script = "import os; from pathlib import Path\nfor p in Path('/proc').glob('[0-9]*/cmdline'):\n"
        script += f"  if b'{module}' in p.read_bytes() and p.parent.name not in ('1', str(os.getpid())):\n"
        script += f"    os.kill(int(p.parent.name), {int(number)})"
        self.docker("exec", container, "python3", "-c", script)

    def wait_healthy(self) -> None:
        """Until Docker calls every container healthy."""
        end_s = time.monotonic() + READY_S
        while True:
            states = [self.inspect(each)["State"] for each in self.containers(every=True)]
            if states and all(state.get("Health", {}).get("Status") == "healthy" for state in states):
                return
            if time.monotonic() > end_s:
                raise AssertionError(self.compose("logs", "--tail", "30") + self.docker("ps", "-a"))
            time.sleep(0.5)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.execute("scheduler", "python3", "-P", "-m", "valence", "status", "--json")
        )
        return found

    def processes(self) -> list[tuple[str, int]]:
        return [(row["service"], row["instance"]) for row in self.status()["processes"] if row["state"] == "ready"]


@pytest.fixture(scope="module")
def stack(docker: dict[str, str]) -> Iterator[Stack]:
    faulthandler.cancel_dump_traceback_later()
    stack = Stack(dict(docker))
    with contextlib.ExitStack() as held:
        held.callback(stack.compose, "down", "--volumes", "--timeout", "10")
        stack.compose("build", "door", "worker")
        stack.compose("up", "-d", "--no-build")
        stack.wait_healthy()
        yield stack


def body(number: int) -> dict[str, Any]:
    sampling = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": 100 + number}
    prompt = f"Tell a story about {number} ships."
    return {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "stream": True, "ignore_eos": True} | sampling


class Streams:
    """Sixteen at once. `begun` is set when each has had some text."""

    def __init__(self, url: str) -> None:
        self.begun = threading.Event()
        self._url, self._waiting, self._lock = url, set(range(STREAMS)), threading.Lock()

    def run(self) -> list[str]:
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            return list(pool.map(self._one, range(STREAMS)))

    @contextlib.contextmanager
    def disturbed(self, undisturbed: list[str]) -> Iterator[None]:
        """What is done inside happens while all of them run, and changes nothing of them."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.run)
            while not self.begun.wait(0.2):
                assert not running.done(), running.exception() or "over before each had begun"
            assert not running.done(), "too fast to be disturbed"
            yield
            assert running.result() == undisturbed

    def _one(self, number: int) -> str:
        text, reasons, done, heard = "", [], False, 0
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body(number), timeout=300) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        text += choice["text"]
                        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                    heard += 1
                    if heard == 3:
                        self._note(number)
        assert done and reasons == ["length"], (number, done, reasons)
        return text

    def _note(self, number: int) -> None:
        with self._lock:
            self._waiting.discard(number)
            if not self._waiting:
                self.begun.set()


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[str]:
    return Streams(stack.url).run()


def capital(stack: Stack) -> str:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(model=MODEL, messages=question, temperature=0)
    return answer.choices[0].message.content or ""


def test_it_answers_the_openai_sdk(stack: Stack) -> None:
    assert "Paris" in capital(stack)


def test_containers_are_as_closed_as_the_file_says(stack: Stack) -> None:
    for service in ("api", "tokenizer", "scheduler", "worker", "door"):
        assert stack.execute(service, "id", "-u").strip() == "10001"
        process = stack.execute(service, "cat", "/proc/self/status")
        assert "CapEff:\t0000000000000000" in process and "NoNewPrivs:\t1" in process
        networks = stack.execute(service, "cat", "/proc/net/dev").splitlines()[2:]
        assert ([line.split(":")[0].strip() for line in networks] == ["lo"]) == (service != "door")
        writing = daemon.run(
            "docker", "exec", stack.containers(service)[0], "touch", "/opt/x", env=stack.environment, check=False
        )
        assert writing.returncode and "Read-only file system" in writing.stderr


def test_the_front_image_has_no_torch(stack: Stack) -> None:
    script = "import importlib.util as u; print([n for n in ('torch', 'triton', 'numba') if u.find_spec(n)])"
    assert stack.execute("tokenizer", "python3", "-c", script).strip() == "[]"
    assert stack.execute("worker", "python3", "-c", script).strip() == "['torch', 'numba']"


def test_every_image_can_trace(stack: Stack) -> None:
    """`traces.endpoint` is a setting like others, and its exporter an extra that an image may lack."""
    for service in ("api", "worker"):
        stack.execute(service, "python3", "-c", "import opentelemetry.exporter.otlp.proto.http.trace_exporter")


def test_services_are_scaled_and_share_one_port(stack: Stack) -> None:
    stack.compose("up", "-d", "--no-build", "--no-recreate", "--scale", "tokenizer=3", "--scale", "api=2")
    stack.wait_healthy()
    expected = [
        ("api", 0),
        ("api", 1),
        ("scheduler", 0),
        ("tokenizer", 0),
        ("tokenizer", 1),
        ("tokenizer", 2),
        ("worker", 0),
    ]
    assert stack.processes() == expected
    for _ in range(48):
        httpx.get(f"{stack.url}/version").raise_for_status()  # a connection each
    end_s = time.monotonic() + 30
    while True:  # figures travel with heartbeats
        counts = [answered(stack, each, "/version") for each in stack.containers("api")]
        if sum(counts) >= 48 or time.monotonic() > end_s:
            break
    assert sum(counts) == 48 and all(counts), counts
    assert "Paris" in capital(stack)


def answered(stack: Stack, container: str, route: str) -> int:
    """How many GETs a replica says to have answered, asked inside its container at its own address."""
    name = stack.docker("exec", container, "python3", "-P", "-m", "valence", "health").split()[0]
    address = f"http://127.0.0.1:{8100 + int(name.removeprefix('api-'))}/metrics"
    script = f"import urllib.request; print(urllib.request.urlopen('{address}').read().decode())"
    lines = stack.docker("exec", container, "python3", "-c", script).splitlines()
    number = name.removeprefix("api-")
    every = (line for line in lines if line.startswith("valence_http_requests_total") and f'"{route}"' in line)
    own = (line for line in every if f'instance="{number}"' in line)
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in own)


def test_files_of_users_outlive_the_api(stack: Stack) -> None:
    """They lie in a volume of their own, which all replicas write; the root is read-only."""
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body(1)}).encode()
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        made = client.files.create(file=("requests.jsonl", line), purpose="batch")
        stack.compose("restart", "api")
        stack.wait_healthy()
        assert client.files.content(made.id).read() == line


@pytest.mark.parametrize("service", ["worker", "scheduler", "tokenizer", "api"])
def test_a_restart_under_streams_loses_nothing(stack: Stack, undisturbed: list[str], service: str) -> None:
    stack.wait_healthy()
    before = {each: stack.inspect(each)["State"]["StartedAt"] for each in stack.containers(service)}
    with Streams(stack.url).disturbed(undisturbed):
        stack.compose("restart", service)
    after = {each: stack.inspect(each)["State"]["StartedAt"] for each in stack.containers(service)}
    assert before.keys() == after.keys() and all(before[each] != after[each] for each in before)


def test_a_killed_worker_comes_back_by_itself(stack: Stack, undisturbed: list[str]) -> None:
    """The service's process, as a fault or the kernel would kill it; Docker restarts the container."""
    stack.wait_healthy()
    container = stack.containers("worker")[0]
    with Streams(stack.url).disturbed(undisturbed):
        stack.send(container, "services.worker", signal.SIGKILL)
    assert stack.inspect(container)["RestartCount"] == 1


def test_what_hangs_is_found_and_replaced(stack: Stack) -> None:
    stack.wait_healthy()
    container = stack.containers("tokenizer")[-1]
    restarts = stack.inspect(container)["RestartCount"]
    stack.send(container, "services.tokenizer", signal.SIGSTOP)
    end_s = time.monotonic() + READY_S
    while stack.inspect(container)["RestartCount"] == restarts:
        assert time.monotonic() < end_s
        time.sleep(0.5)
    stack.wait_healthy()
    assert [number for name, number in stack.processes() if name == "tokenizer"] == [0, 1, 2]


def test_after_the_door_goes_the_replicas_listen_afresh(stack: Stack) -> None:
    stack.wait_healthy()
    stack.compose("restart", "door")
    stack.wait_healthy()
    assert "Paris" in capital(stack)
    assert [each for each in stack.processes() if each[0] == "api"] == [("api", 0), ("api", 1)]


def test_a_file_of_keys_closes_the_api(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    command = [sys.executable, "-m", "valence", "keys", "add", "ann", "--file", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    key = next(word for word in printed.split() if word.startswith("vl-"))
    if os.geteuid() == 0:
        os.chown(file, 0, 10001)
        file.chmod(0o640)
    tmp_path.chmod(0o755)
    stack.environment |= {"API_KEYS": str(file), "SET": f"{SETTINGS} api.keys_file=/run/secrets/api_keys"}
    stack.compose("up", "-d", "--no-build")
    stack.wait_healthy()
    assert httpx.get(f"{stack.url}/v1/models").status_code == 401
    answer = httpx.get(f"{stack.url}/v1/models", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200 and answer.json()["data"][0]["id"] == MODEL


def test_down_leaves_nothing(stack: Stack) -> None:
    stack.compose("down", "--volumes")
    label = f"label=com.docker.compose.project={stack.project}"
    assert stack.containers(every=True) == []
    assert stack.docker("volume", "ls", "-q", "--filter", label).split() == []
    assert stack.docker("network", "ls", "-q", "--filter", label).split() == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{stack.url}/live")
