"""`valence serve`: brings the services up under a supervisor, stays in the foreground, and ends everything.

Owns the run directory and the supervisor process from claim to release. Nothing that it started outlives it: on a
signal it ends the supervisor, which drains the services from the edge inwards; killed, the kernel ends the supervisor.
"""

import contextlib
import errno
import http.client
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections import Counter
from pathlib import Path
from types import FrameType

import msgspec
import psutil
from rich.console import Console

from common import api_keys, env, model_source
from common import config as configuration
from common.config import Config
from common.errors import EXIT_CONFIG, ConfigError
from common.protocol import ModelFacts, Status
from common.transport import secure
from valence import display, programs, rundir, supervisor
from valence.programs import Program
from valence.status import StatusClient, all_ready
from valence.supervisor import Event, EventLog, Supervisor, SupervisorGone
from valence.watch import ROUND_S, Watch

START_TRIES = 3  # a service that ended so often before it was ready will not get ready
LOOK_S = 0.25  # how often a running system is looked at
LOG_LINES = 25
SAME_SIGNAL_S = 0.5
KILLED_S = 10.0  # a killed process may still have to give back much memory


class Failure(Exception):
    """The services cannot be brought up, or kept up."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP as a count to look at and a pipe to wait on.

    Signals in quick succession are one: `make` passes on a SIGTERM that the process group has had already.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last_s = float("-inf")
        self._read, self._write = os.pipe()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s > SAME_SIGNAL_S:
            self.count += 1
            os.write(self._write, b".")
        self._last_s = now_s

    def wait(self, wait_s: float) -> None:
        """Returns after `wait_s`, or at the next signal."""
        if select.select([self._read], [], [], wait_s)[0]:
            os.read(self._read, 1)


def prepare(config: Config) -> Config:
    """The settings with everything decided that serve decides. Raises ConfigError for what can be seen beforehand."""
    model_source.resolve(config.model.source)
    port = free_port(config.api.host, config.api.port)
    config = msgspec.structs.replace(config, api=msgspec.structs.replace(config.api, port=port))
    run_dir = str(Path(config.run_dir).absolute())
    config = msgspec.structs.replace(config, links=msgspec.structs.replace(config.links, run_dir=run_dir))
    config = with_link_keys(config)
    api_keys.given(env.api_keys())
    api_keys.given(env.admin_keys(), admin=True)
    if not config.api.keys_file:
        return config
    api_keys.read(config.api.keys_file)
    keys_file = str(Path(config.api.keys_file).absolute())
    return msgspec.structs.replace(config, api=msgspec.structs.replace(config.api, keys_file=keys_file))


def with_link_keys(config: Config) -> Config:
    """The folder of the links' keys as an absolute path. Raises ConfigError if they cannot be used, or are needed."""
    links = config.links
    if links.keys_dir:
        links = msgspec.structs.replace(links, keys_dir=str(Path(links.keys_dir).absolute()))
    secure(links)
    return msgspec.structs.replace(config, links=links)


def free_port(host: str, port: int) -> int:
    """`port`, or any free one for 0. Raises ConfigError if it cannot be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise ConfigError(f"api.host {host!r} is no address: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is taken{_holder(port)}; choose another with PORT= or --port") from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _holder(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
        listening = (c for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr[1] == port)
        pid = next((c.pid for c in listening if c.pid), None)
        return f" by {psutil.Process(pid).name()} (pid {pid})" if pid else ""
    except (psutil.Error, OSError):
        return ""


def serve(config: Config) -> int:
    """Runs until a signal or a failure. Returns the exit status."""
    interrupts = Interrupts()
    console = display.LastingConsole(highlight=False)
    run_dir = Path(config.run_dir)
    if not Supervisor(run_dir).alive():  # otherwise the claim names who runs there, rather than the port being taken
        config = prepare(config)
        run_dir = config.run_dir
    claim = rundir.claim(run_dir)
    (run_dir / "config.toml").write_text(configuration.render(config))
    replicas = programs.configured_replicas(config)
    daemon = supervisor.start(run_dir, programs.render(config, run_dir, replicas), claim.fd)
    session = Session(config, daemon, console, interrupts)
    failed = True
    try:
        model = session.bring_up(sum(replicas.values()))
        if model:
            elapsed_s = time.time() - psutil.Process().create_time()
            keyed = bool(config.api.keys_file or env.api_keys() or env.admin_keys())
            display.announce(console, rundir.url(config), model, run_dir / "log", own_command(), elapsed_s, keyed)
            session.watch()
        failed = False
    except Failure as failure:
        console.print(f"[bold red]failed:[/] {failure}", soft_wrap=True)
        for line in display.tail(failure.log, LOG_LINES):
            console.print(f"  {line}", markup=False, soft_wrap=True)
        console.print(f"logs: {run_dir / 'log'}", soft_wrap=True)
    finally:
        session.end()
        claim.release(keep_logs=failed)
    return 1 if failed else 0


def own_command() -> str:
    """How this command is called here: by name if the shell finds it, else by path."""
    script = Path(sys.executable).with_name("valence")
    found = shutil.which("valence")
    return "valence" if found and Path(found).absolute() == script else os.path.relpath(script)


class Session:
    """One supervisor process, watched."""

    def __init__(
        self, config: Config, daemon: "subprocess.Popen[bytes]", console: Console, interrupts: Interrupts
    ) -> None:
        self._config = config
        self._daemon = daemon
        self._console = console
        self._interrupts = interrupts
        self._supervisor = Supervisor(config.run_dir)
        self._events = EventLog(config.run_dir)
        self._watch = Watch(config.links)
        self._watched_s = float("-inf")

    def bring_up(self, expected: int) -> ModelFacts | None:
        """Shows the start until all is ready; None if a signal came first. Raises Failure."""
        self._wake_until_spawned()
        ended: Counter[Program] = Counter()
        with StatusClient(self._config) as client, display.StartDisplay(self._console) as bars:
            while not self._interrupts.count:
                for event in self._news():
                    if event.kind == "exited":
                        ended[event.program] += 1
                        self._tell(event)
                        self._give_up_on(event, ended[event.program])
                status = client.ask(wait_s=0.1)
                self._end_hung(status)
                if status:
                    bars.show(display.stages(status, expected))
                    if status.model and self._all_ready(status) and self._answers():
                        self._end_hung(status, at_once=True)  # all are well now: from here on silence is suspicious
                        bars.complete()
                        return status.model
                self._interrupts.wait(0.03)
        return None

    def _wake_until_spawned(self) -> None:
        """The supervisor starts nothing before its first wait of a second is over, or somebody calls."""
        while not self._interrupts.count and not self._news():
            self._supervisor.wake()
            self._interrupts.wait(0.02)

    def _give_up_on(self, event: Event, tries: int) -> None:
        log = self._log_of(event.program)
        if event.exit_status == EXIT_CONFIG:
            raise Failure(f"{event.program.name} cannot work with these settings", log)
        if tries >= START_TRIES:
            raise Failure(f"{event.program.name} ended {tries} times before it was ready", log)

    def _all_ready(self, status: Status | None) -> bool:
        """Whether every process is up, listed and ready. False while the supervisor does not answer."""
        try:
            return all_ready(self._supervisor.processes(), status)
        except (SupervisorGone, xmlrpc.client.Fault):
            return False

    def _answers(self) -> bool:
        """Whether /health/ready says 200."""
        url = rundir.url(self._config).removeprefix("http://")
        connection = http.client.HTTPConnection(url, timeout=2.0)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def watch(self) -> None:
        """Until a signal: a line for each end and start of a service, and one when all is well again.

        What hangs is killed, so that the supervisor replaces it.
        """
        changed_s: float | None = None  # when the first of the processes that are not well yet ended or came
        with StatusClient(self._config) as client:
            while not self._interrupts.count:
                for event in self._news():
                    self._tell(event)
                    changed_s = changed_s or time.monotonic()
                    if event.exit_status == EXIT_CONFIG:
                        self._hold(event)
                status = client.ask(wait_s=LOOK_S)
                self._end_hung(status)
                if changed_s and self._all_ready(status):
                    self._say(f"all processes ready, after {time.monotonic() - changed_s:.1f} s")
                    changed_s = None
                self._interrupts.wait(LOOK_S)

    def _end_hung(self, status: Status | None, at_once: bool = False) -> None:
        """Kills what does not respond or stands still; the supervisor then starts it anew."""
        now_s = time.monotonic()
        if at_once or status is None or now_s - self._watched_s >= ROUND_S:
            self._watched_s = now_s
            try:
                verdicts = self._watch.look(self._supervisor.processes(), status, now_s)
            except (SupervisorGone, xmlrpc.client.Fault):
                return
            for program, pid, reason in verdicts:
                self._say(f"{program.name} hangs ({reason}); killing pid {pid}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _news(self) -> list[Event]:
        """New events. Raises Failure if the supervisor is gone."""
        if self._daemon.poll() is not None:
            log = self._config.run_dir / "log" / "supervisord.out"
            raise Failure(f"the supervisor ended with status {self._daemon.returncode}", log)
        events = list(self._events.new())
        if any(event.kind == "exited" for event in events):
            self._supervisor.wake()
        return events

    def _hold(self, event: Event) -> None:
        """A service that refuses its settings is not tried again until somebody restarts it."""
        self._supervisor.stop(event.program)
        for line in display.tail(self._log_of(event.program), LOG_LINES):
            self._say(line)
        self._say(f"{event.program.name} stays down; repair it, then: valence restart {event.program.service}")

    def _tell(self, event: Event) -> None:
        name = event.program.name
        if event.kind == "spawned":
            self._say(f"{name} started (pid {event.pid})")
        elif event.kind == "stopped":
            self._say(f"{name} stopped ({event.detail})")
        else:
            self._say(f"{name} ended: {event.detail}; see {self._log_of(event.program)}")

    def _say(self, line: str) -> None:
        self._console.print(f"{display.clock()} {line}", markup=False, soft_wrap=True)

    def _log_of(self, program: Program) -> Path:
        return self._config.run_dir / "log" / f"{program.name}.log"

    def end(self) -> None:
        """Drains and ends the services and the supervisor. One more signal ends them without draining."""
        asked = self._interrupts.count
        if self._daemon.poll() is None:
            with contextlib.suppress(OSError):  # the terminal may be what has gone
                self._console.print("stopping (once more to stop without finishing open requests)")
            self._daemon.terminate()
        while self._daemon.poll() is None:
            self._supervisor.wake()
            self._interrupts.wait(0.05)
            if self._interrupts.count > max(asked, 1):
                break
        kill_rest(self._config.run_dir)
        self._daemon.kill()
        self._daemon.wait()


def kill_rest(run_dir: Path) -> None:
    """Kills whatever still runs for this run directory."""
    config_file = str(run_dir / "config.toml")
    rest = [p for p in psutil.process_iter(["cmdline"]) if config_file in (p.info["cmdline"] or [])]
    for process in rest:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(rest, timeout=KILLED_S)
