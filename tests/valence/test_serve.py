"""The life of `valence serve`: ready, healing, ending, failing. Services at the edge are stand-ins."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.config import load
from common.errors import ConfigError
from tests.valence.running import Server, serving, still_running
from valence import serve
from valence.supervisor import Supervisor


def pid_of(server: Server, service: str) -> int:
    return next(view.pid for view in Supervisor(server.run_dir).processes() if view.program.service == service)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_and_leaves_nothing(number: signal.Signals) -> None:
    with serving() as server:
        assert "SmolLM2-135M-Instruct" in server.read_until("Ready after")
        assert len(still_running(server.run_dir)) == 6  # serve, supervisord, four services
        server.process.send_signal(number)
        assert server.finish() == 0
        assert still_running(server.run_dir) == []
        assert not server.run_dir.exists()


def test_a_signal_during_the_start_ends_it() -> None:
    with serving() as server:
        server.read_until("processes")
        server.process.send_signal(signal.SIGINT)
        assert server.finish() == 0
        assert still_running(server.run_dir) == []
        assert not server.run_dir.exists()


def test_a_terminal_that_goes_away_ends_everything() -> None:
    with serving() as server:
        server.read_until("curl")
        assert server.process.stdout
        server.process.stdout.close()
        server.process.send_signal(signal.SIGHUP)
        server.process.wait()
        assert still_running(server.run_dir) == []
        assert not server.run_dir.exists()


def test_one_more_signal_does_not_wait_for_a_service_that_does_not_end() -> None:
    with serving("--set", "model.name=stubborn", "--set", "links.drain_s=500") as server:
        server.read_until("curl")
        while server.process.poll() is None:
            server.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(timeout=2 * serve.SAME_SIGNAL_S)
        # a signal that comes when all is done, and Python has no handlers any more, ends what is left of the process
        assert server.finish() in (0, -signal.SIGTERM)
        assert still_running(server.run_dir) == []
        assert not server.run_dir.exists()


def test_signals_in_quick_succession_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    now_s = [100.0]
    monkeypatch.setattr(serve.time, "monotonic", lambda: now_s[0])
    interrupts = serve.Interrupts()
    counts = []
    for elapsed_s in (0.0, 0.01, 0.4, 0.6):
        now_s[0] += elapsed_s
        interrupts._on_signal(signal.SIGTERM, None)
        counts.append(interrupts.count)
    assert counts == [1, 1, 1, 2]
    interrupts.wait(0.0)


def test_a_killed_service_comes_back() -> None:
    with serving() as server:
        server.read_until("curl")
        old_pid = pid_of(server, "scheduler")
        os.kill(old_pid, signal.SIGKILL)
        assert "scheduler-0 ended: terminated by SIGKILL" in server.read_until("scheduler-0")
        assert "started" in server.read_until("scheduler-0")
        server.read_until("all processes ready")
        assert pid_of(server, "scheduler") != old_pid


def test_a_stopped_service_is_killed_and_comes_back() -> None:
    """Each in turn."""
    with serving("--set", "links.dead_after_s=3") as server:
        server.read_until("curl")
        for service in ("scheduler", "tokenizer", "worker", "api"):
            old_pid = pid_of(server, service)
            os.kill(old_pid, signal.SIGSTOP)
            why = "it has not answered for" if service == "scheduler" else "the scheduler has given it up"
            line = server.read_until(f"{service}-0 hangs")
            assert f"{service}-0 hangs ({why}" in line and line.endswith(f"killing pid {old_pid}")
            assert "terminated by SIGKILL" in server.read_until(f"{service}-0 ended")
            server.read_until("all processes ready")
            assert pid_of(server, service) != old_pid


def test_nothing_outlives_a_killed_serve() -> None:
    with serving() as server:
        server.read_until("curl")
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) == 5
        server.process.kill()
        psutil.wait_procs(children, timeout=240)
        assert still_running(server.run_dir) == []
        # What it left does not disturb the next one.
        again = Server(server.run_dir)
        again.read_until("Ready after")
        again.process.terminate()
        assert again.finish() == 0


def test_nothing_outlives_a_killed_supervisor() -> None:
    with serving() as server:
        server.read_until("curl")
        (supervisord,) = psutil.Process(server.process.pid).children()
        supervisord.kill()
        assert server.finish() == 1
        assert any("the supervisor ended" in line for line in server.lines)
        assert still_running(server.run_dir) == []


def test_a_service_that_refuses_its_settings_ends_the_start_with_its_log() -> None:
    with serving("--set", "model.name=refuse") as server:
        assert server.finish() == 1
        text = "\n".join(server.lines)
        assert "tokenizer-0 cannot work with these settings" in text
        assert "configuration: the stand-in refuses" in text
        assert (server.run_dir / "log" / "tokenizer-0.log").exists()
        assert still_running(server.run_dir) == []


def test_a_service_that_keeps_ending_ends_the_start() -> None:
    with serving("--set", "model.name=crash") as server:
        assert server.finish() == 1
        assert any("tokenizer-0 ended 3 times before it was ready" in line for line in server.lines)


def test_a_second_server_in_the_same_run_directory_is_refused(server: Server) -> None:
    second = Server(server.run_dir)
    assert second.finish() == 78
    assert f"already running in {server.run_dir} (valence serve, pid {server.process.pid})" in "\n".join(second.lines)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} is taken by .*\(pid {os.getpid()}\)"):
            serve.free_port("127.0.0.1", port)


def test_ports_and_hosts_that_cannot_be() -> None:
    assert serve.free_port("127.0.0.1", 0) > 0
    with pytest.raises(ConfigError, match="is no address"):
        serve.free_port("no.such.host.invalid", 0)


def test_a_missing_model_is_told_before_anything_starts(tmp_path: Path) -> None:
    config = load(None, [f"model.source={tmp_path}/none.gguf", f"links.run_dir={tmp_path}/run"])
    with pytest.raises(ConfigError, match=r"none\.gguf"):
        serve.prepare(config)
    assert not (tmp_path / "run").exists()


def test_prepare_decides_port_and_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = serve.prepare(load(None, ["api.port=0", "links.run_dir=here"]))
    assert config.api.port > 0
    assert config.run_dir == tmp_path / "here"


def test_people_are_shown_a_command_that_exists_here(monkeypatch: pytest.MonkeyPatch) -> None:
    binaries = Path(sys.executable).parent
    monkeypatch.setenv("PATH", "/nowhere")
    assert Path(serve.own_command()).resolve() == (binaries / "valence").resolve()
    monkeypatch.setattr(serve.shutil, "which", lambda name: str(binaries / name))
    assert serve.own_command() == "valence"


def test_keys_that_cannot_be_read_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(None, ["api.port=0", "links.run_dir=here", "api.keys_file=keys"])
    with pytest.raises(ConfigError, match="cannot read keys"):
        serve.prepare(config)
    (tmp_path / "keys").touch()
    assert serve.prepare(config).api.keys_file == str(tmp_path / "keys")
    monkeypatch.setenv("VALENCE_API_KEYS", "ann=")
    with pytest.raises(ConfigError, match="VALENCE_API_KEYS: entry 1"):
        serve.prepare(config)
