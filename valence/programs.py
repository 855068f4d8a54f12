"""The supervisor's configuration: one program per service process. Pure.

Which replicas exist is written here and nowhere else; `valence scale` renders the file anew with other numbers.
"""

import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from common.config import Config
from common.env import FOR_SERVICES, child_environment
from common.errors import EXIT_CONFIG

# In order of start; the supervisor stops in reverse, so that requests drain from the edge inwards.
SERVICES = ("worker", "scheduler", "tokenizer", "api")
SCALABLE = ("api", "tokenizer", "scheduler", "worker")
KILL_AFTER_S = 5  # beyond the drain time


class Program(NamedTuple):
    """One service process, as the supervisor calls it: `api-0`."""

    service: str
    instance: int

    @property
    def name(self) -> str:
        return f"{self.service}-{self.instance}"

    @classmethod
    def parse(cls, name: str) -> "Program":
        service, _, instance = name.rpartition("-")
        return cls(service, int(instance))


def configured_replicas(config: Config) -> dict[str, int]:
    """Processes per service, as the configuration wants them."""
    services = config.services
    return {name: getattr(services, name).replicas for name in SERVICES}


def programs(replicas: Mapping[str, int]) -> list[Program]:
    return [Program(service, i) for service in SERVICES for i in range(replicas[service])]


def service_command(program: Program, config_file: Path) -> list[str]:
    """The command line of a service process."""
    python = [sys.executable, "-P", "-m", "valence.launch", "SIGKILL", "0", f"services.{program.service}"]
    return [*python, "--instance", str(program.instance), "--config", str(config_file)]


def render(config: Config, run_dir: Path, replicas: Mapping[str, int]) -> str:
    """The whole configuration file of supervisord."""
    return _daemon(run_dir) + "".join(
        program_section(
            program,
            service_command(program, run_dir / "config.toml"),
            _environment(program.service, config),
            stop_wait_s=math.ceil(config.links.drain_s + lag_s(program.service, config)) + KILL_AFTER_S,
            log_file=run_dir / "log" / f"{program.name}.log",
        )
        for program in programs(replicas)
    )


def lag_s(service: str, config: Config) -> float:
    """How long a service goes on before it drains."""
    return config.api.drain_lag_s if service == "api" else 0.0


def _daemon(run_dir: Path) -> str:
    run = str(run_dir)
    return f"""\
[supervisord]
nodaemon = true
silent = true
nocleanup = true
identifier = valence
logfile = {run}/log/supervisord.log
logfile_maxbytes = 0
pidfile = {run}/supervisord.pid
childlogdir = {run}/log
minfds = 256
minprocs = 16

[unix_http_server]
file = {run}/supervisor.sock
chmod = 0700

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
"""


def program_section(
    program: Program, command: list[str], environment: Mapping[str, str], stop_wait_s: int, log_file: Path
) -> str:
    """One [program:x]. Everything but a configuration error is restarted, also exit status 0.

    A process that ends within a second of its start is tried again after 1, 2, 3 ... seconds, without end.
    """
    variables = ",".join(f'{key}="{_escaped(value)}"' for key, value in environment.items())
    return f"""
[program:{program.name}]
command = {_escaped(shlex.join(command))}
environment = {variables}
priority = {10 * (1 + SERVICES.index(program.service))}
autorestart = unexpected
exitcodes = {EXIT_CONFIG}
startsecs = 1
startretries = 1000000
stopsignal = TERM
stopwaitsecs = {stop_wait_s}
killasgroup = true
redirect_stderr = true
stdout_logfile = {log_file}
stdout_logfile_maxbytes = 20MB
stdout_logfile_backups = 2
"""


def _environment(service: str, config: Config) -> dict[str, str]:
    """What differs from the environment that the supervisor itself has: only the worker computes in many threads."""
    common = child_environment(0)
    own = child_environment(config.worker.threads if service == "worker" else 1)
    hidden = {} if service == "api" else dict.fromkeys(FOR_SERVICES & common.keys(), "")  # only the API asks for keys
    return {key: value for key, value in own.items() if common.get(key) != value} | hidden


def _escaped(text: str) -> str:
    """The supervisor expands %(name)s."""
    return text.replace("%", "%%")
