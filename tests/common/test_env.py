import os
from pathlib import Path

import pytest

from common import env
from common.errors import ConfigError


def test_a_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALENCE_CONFG", "x")
    with pytest.raises(ConfigError, match="VALENCE_CONFG"):
        env.check()


def test_known_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALENCE_CONFIG", "a.toml")
    monkeypatch.setenv("VALENCE_SET", "a.b=1  c.d=2")
    env.check()
    assert env.config_path() == "a.toml"
    assert env.settings() == ["a.b=1", "c.d=2"]


def test_children_get_their_settings_from_the_file_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALENCE_SET", "a.b=1")
    child = env.child_environment(threads=3)
    assert "VALENCE_SET" not in child
    assert child["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in env.child_environment(threads=0)


def test_openmp_threads_spin_briefly_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert env.child_environment(threads=0)["GOMP_SPINCOUNT"] == "20000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "GOMP_SPINCOUNT" not in env.child_environment(threads=0)


def test_compiled_kernels_go_where_they_are_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    env.keep_compiled_in(tmp_path)
    child = env.child_environment(threads=0)
    assert child["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert child["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_the_users_cache_follows_the_desktops_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.user_cache() == tmp_path / "valence"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.user_cache() == Path.home() / ".cache" / "valence"


def test_keys_reach_the_services_by_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALENCE_API_KEYS", "ann=vl-1")
    monkeypatch.setenv("VALENCE_API_KEY", "vl-1")
    env.check()
    assert (env.api_keys(), env.api_key()) == ("ann=vl-1", "vl-1")
    child = env.child_environment(threads=0)
    assert child["VALENCE_API_KEYS"] == "ann=vl-1" and "VALENCE_API_KEY" not in child


def test_triton_is_interpreted_where_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, interprets in (("1", True), ("true", True), ("0", False), ("", False)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert env.interprets_triton() is interprets


def test_a_process_sees_one_gpu_of_those_it_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*env.DEVICE_LISTS["amd"], *env.DEVICE_LISTS["nvidia"], "CUDA_DEVICE_ORDER"}:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert env.show_devices("amd", [8], 8) is None and not env.is_set("ROCR_VISIBLE_DEVICES")
    assert env.show_devices("amd", [7], 8) == "ROCR_VISIBLE_DEVICES=7"
    assert env.show_devices("amd", [0], 8) == "ROCR_VISIBLE_DEVICES=7" and env.show_devices("amd", [1], 8) is None
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "6, 1,GPU-7")
    assert env.show_devices("amd", range(2, 4), 8) is None and os.environ["ROCR_VISIBLE_DEVICES"] == "6, 1,GPU-7"
    assert env.show_devices("amd", range(1, 3), 8) == "ROCR_VISIBLE_DEVICES=1,GPU-7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides all
    assert env.show_devices("amd", [0], 8) is None and env.show_devices("nvidia", [0], 8) is None


def test_defaults_of_libraries_are_only_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_TEST_A", "theirs")
    monkeypatch.setenv("AITER_TEST_B", "")
    monkeypatch.delenv("AITER_TEST_B")
    assert env.set_defaults({"AITER_TEST_A": "ours", "AITER_TEST_B": "ours"}) == {
        "AITER_TEST_A": "theirs",
        "AITER_TEST_B": "ours",
    }
