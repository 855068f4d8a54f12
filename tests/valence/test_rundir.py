import os
import socket
from pathlib import Path

import pytest

from common import config as configuration
from common.config import load, render
from common.errors import ConfigError
from valence import rundir


def test_a_claimed_directory_is_private_empty_and_ours(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "scheduler").write_text("left by a dead run")
    (path / "log").mkdir()
    claim = rundir.claim(path)
    assert [entry.name for entry in path.iterdir()] == ["lock"]
    assert path.stat().st_mode & 0o777 == 0o700
    assert rundir.owner_pid(path) == os.getpid()
    with pytest.raises(ConfigError, match=f"already running.*pid {os.getpid()}"):
        rundir.claim(path)
    claim.release()
    assert not path.exists()
    rundir.claim(path).release()


def test_logs_of_a_failed_run_stay_for_reading(tmp_path: Path) -> None:
    claim = rundir.claim(tmp_path / "run")
    (claim.path / "log").mkdir()
    (claim.path / "log" / "api-0.log").write_text("why")
    (claim.path / "config.toml").write_text("")
    claim.release(keep_logs=True)
    assert [entry.name for entry in claim.path.iterdir()] == ["log"]
    again = rundir.claim(claim.path)
    assert [entry.name for entry in again.path.iterdir()] == ["lock"]
    again.release()


def test_a_path_that_the_supervisor_would_misread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="may hold no %"):
        rundir.claim(tmp_path / "50%")
    assert not (tmp_path / "50%").exists()


def listen(run_dir: Path) -> socket.socket:
    run_dir.mkdir(parents=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(run_dir / "supervisor.sock"))
    server.listen()
    return server


def test_find_takes_the_only_one_that_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "default_run_root", lambda: tmp_path / "root")
    with pytest.raises(rundir.NotRunning, match="no server is running"):
        rundir.find()
    (tmp_path / "root" / "7999").mkdir(parents=True)  # without a supervisor: dead
    dead = listen(tmp_path / "root" / "7998")
    dead.close()  # its socket file is still there
    with listen(tmp_path / "root" / "8000"):
        assert rundir.find() == tmp_path / "root" / "8000"
        assert rundir.find(port=8000) == tmp_path / "root" / "8000"
        with pytest.raises(rundir.NotRunning, match="7999"):
            rundir.find(port=7999)
        with listen(tmp_path / "root" / "8001"):
            with pytest.raises(rundir.NotRunning, match="--port 8000, --port 8001"):
                rundir.find()
            assert rundir.find(run_dir=str(tmp_path / "root" / "8001")).name == "8001"


def test_settings_of_a_run_are_read_from_its_directory(tmp_path: Path) -> None:
    config = load(None, ["api.port=8123", f"links.run_dir={tmp_path}"])
    (tmp_path / "config.toml").write_text(render(config))
    assert rundir.running_config(tmp_path) == config
    assert rundir.owner_pid(tmp_path) == 0


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80")],
)
def test_url_is_one_that_a_client_can_reach(host: str, url: str) -> None:
    assert rundir.url(load(None, [f"api.host={host}", "api.port=80"])) == url


def test_records_are_found_after_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "default_run_root", lambda: tmp_path / "root")
    with pytest.raises(rundir.NotRunning, match="no server is running"):
        rundir.find_recorded()
    first, second = (tmp_path / "root" / port for port in ("7001", "7002"))
    (first / "record").mkdir(parents=True)
    assert rundir.find_recorded() == rundir.find_recorded(port=7001) == rundir.find_recorded(str(first)) == first
    (second / "record").mkdir(parents=True)
    with pytest.raises(rundir.NotRunning, match="say which: --port 7001, --port 7002"):
        rundir.find_recorded()
    with pytest.raises(rundir.NotRunning, match="nor has one left a record"):
        rundir.find_recorded(port=7003)
    (second / "supervisor.sock").unlink(missing_ok=True)
    (second / "record").rmdir()
    second.rmdir()
    server = listen(second)
    assert rundir.find_recorded() == second  # what runs comes first
    server.close()


def test_records_and_reports_outlive_a_failed_run_and_the_next_claim(tmp_path: Path) -> None:
    claim = rundir.claim(tmp_path / "run")
    for name in ("log", "record", "crash"):
        (claim.path / name).mkdir()
    claim.release(keep_logs=True)
    again = rundir.claim(claim.path)
    assert sorted(entry.name for entry in again.path.iterdir()) == ["crash", "lock", "record"]
    again.release()
    assert not again.path.exists()
