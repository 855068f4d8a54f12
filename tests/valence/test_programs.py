"""The generated file is read back by the supervisor's own parser."""

import shlex
import sys
from pathlib import Path

import pytest
from supervisor.datatypes import RestartWhenExitUnexpected
from supervisor.options import ServerOptions
from supervisor.process import ProcessStates

from common.config import load
from valence.programs import Program, configured_replicas, program_section, programs, render, service_command


@pytest.fixture
def parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Supervisor's view of a configuration with two tokenizers, below a path with all that needs quoting."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # what the supervisor has itself is not written down
    run_dir = tmp_path / "some of it's"
    (run_dir / "log").mkdir(parents=True)
    settings = ["services.tokenizer.replicas=2", "links.drain_s=7.5", "worker.threads=3", "api.drain_lag_s=3"]
    config = load(None, settings)
    file = run_dir / "supervisord.conf"
    file.write_text(render(config, run_dir, configured_replicas(config)))
    options = ServerOptions()
    options.realize(["-c", str(file)])
    groups = {group.name: group.process_configs for group in options.process_group_configs}
    return {"options": options, "run_dir": run_dir, "groups": groups}


def test_one_program_per_replica_started_from_the_worker_outwards(parsed: dict) -> None:
    assert list(parsed["groups"]) == ["worker-0", "scheduler-0", "tokenizer-0", "tokenizer-1", "api-0"]
    assert all(len(processes) == 1 for processes in parsed["groups"].values())
    priorities = [processes[0].priority for processes in parsed["groups"].values()]
    assert priorities == sorted(priorities)  # and the supervisor stops in reverse


def test_a_program_is_the_service_with_its_number_and_the_resolved_settings(parsed: dict) -> None:
    process = parsed["groups"]["tokenizer-1"][0]
    assert process.command.startswith(sys.executable)
    arguments = shlex.split(process.command)
    assert arguments == service_command(Program("tokenizer", 1), parsed["run_dir"] / "config.toml")
    assert arguments[-5:] == ["services.tokenizer", "--instance", "1", "--config", f"{parsed['run_dir']}/config.toml"]
    assert process.stdout_logfile == f"{parsed['run_dir']}/log/tokenizer-1.log"
    assert process.redirect_stderr


def test_only_a_configuration_error_is_not_restarted(parsed: dict) -> None:
    for name, (process,) in parsed["groups"].items():
        assert process.autorestart is RestartWhenExitUnexpected
        assert process.exitcodes == [78]
        assert process.startretries >= 1_000_000
        most_s = 11 if name == "api-0" else 8
        assert process.stopwaitsecs == most_s + 5  # longer than the drain, so that no drain is cut short
        assert process.killasgroup
        assert not process.stopasgroup


def test_only_the_worker_computes_in_many_threads(parsed: dict) -> None:
    threads = {name: processes[0].environment.get("OMP_NUM_THREADS") for name, processes in parsed["groups"].items()}
    assert threads == {"worker-0": "3", "scheduler-0": "1", "tokenizer-0": "1", "tokenizer-1": "1", "api-0": "1"}


def test_workers_have_replicas() -> None:
    config = load(None, ["services.worker.replicas=3"])
    assert configured_replicas(config) == {"worker": 3, "scheduler": 1, "tokenizer": 1, "api": 1}


def test_control_is_for_this_user_only(parsed: dict) -> None:
    (server,) = parsed["options"].configroot.supervisord.server_configs
    assert server["file"] == f"{parsed['run_dir']}/supervisor.sock"
    assert server["chmod"] == 0o700
    assert parsed["options"].nodaemon


def test_names_are_read_back() -> None:
    assert Program.parse("api-12") == Program("api", 12)
    assert Program.parse(Program("worker", 0).name) == Program("worker", 0)
    assert [p.name for p in programs({"worker": 1, "scheduler": 0, "tokenizer": 0, "api": 2})] == [
        "worker-0",
        "api-0",
        "api-1",
    ]


def test_workers_and_schedulers_have_replicas_too() -> None:
    config = load(None, ["services.scheduler.replicas=2", "services.worker.replicas=3"])
    names = [program.name for program in programs(configured_replicas(config))]
    assert names[:5] == ["worker-0", "worker-1", "worker-2", "scheduler-0", "scheduler-1"]


def test_percent_signs_reach_the_environment(tmp_path: Path) -> None:
    section = program_section(Program("api", 0), ["true"], {"RATE": "50%"}, 1, tmp_path / "x.log")
    assert 'environment = RATE="50%%"' in section


def test_states_are_the_words_that_status_shows() -> None:
    names = {name.lower() for name in vars(ProcessStates) if name.isupper()}
    assert names >= {"stopped", "starting", "running", "backoff", "stopping", "exited", "fatal"}


def test_keys_of_the_api_reach_the_api_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALENCE_API_KEYS", "ann=vl-secret")
    monkeypatch.delenv("VALENCE_ADMIN_KEYS", raising=False)
    text = render(load(), Path("/run/x"), {"worker": 1, "scheduler": 1, "tokenizer": 1, "api": 1})
    assert "vl-secret" not in text
    for section in text.split("[program:")[1:]:
        assert ('VALENCE_API_KEYS=""' in section) == (not section.startswith("api-"))
        assert "VALENCE_ADMIN_KEYS" not in section
