from pathlib import Path

import httpx
import pytest

from common import api_keys
from common.config import load
from common.errors import ConfigError
from common.lifecycle import Process
from common.protocol import Control
from services.api.process import admin_listener
from tests.ports import free_port
from tests.services.api.system import COMPLETION, running, scenario
from tests.services.api.test_app import error_of
from valence.keys import add


@pytest.fixture
def port() -> str:
    """A free one for replica 1, which the tests run."""
    return f"api.admin_port={free_port() - 1}"


def test_status_is_at_the_administrative_address_only(port: str) -> None:
    async def main() -> None:
        async with running(port) as (system, client):
            assert system.admin is not None
            assert error_of(await client.get("/admin/status"))["code"] == "not_found"
            async with httpx.AsyncClient(base_url=system.admin.url) as admin:
                found = (await admin.get("/admin/status")).json()
                assert found["ready"] and found["missing"] == []
                services = {(each["service"], each["instance"]): each for each in found["processes"]}
                assert services["api", 1]["pid"] > 0 and services["tokenizer", 0]["figures"] == {"requests": 5.0}
                assert found["model"]["name"] == "tiny" and found["load"]["running"] == 3
                assert (await admin.get("/health/ready")).status_code == 200
                assert (await admin.get("/metrics")).status_code == 200
                for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")):
                    assert (await admin.request(method, path, json=COMPLETION)).status_code == 404
            assert "/admin/status" not in (await client.get("/openapi.json")).text

    scenario(main)


@pytest.mark.parametrize(("where", "main", "admin"), [("main", 200, 404), ("admin", 404, 200), ("both", 200, 200)])
def test_figures_are_where_the_operator_wants_them(port: str, where: str, main: int, admin: int) -> None:
    async def check() -> None:
        async with running(port, f"api.metrics={where}") as (system, client):
            assert system.admin is not None
            assert (await client.get("/metrics")).status_code == main
            async with httpx.AsyncClient(base_url=system.admin.url) as other:
                assert (await other.get("/metrics")).status_code == admin

    scenario(check)


def test_without_a_port_there_is_no_address_and_the_routes_are_nowhere_unless_told() -> None:
    async def main() -> None:
        async with running() as (system, client):
            assert system.admin is None
            assert (await client.get("/admin/status")).status_code == 404
        async with running("api.admin_on_main=true") as (_, client):
            assert (await client.get("/admin/status")).status_code == 200
            assert "/admin/status" in (await client.get("/openapi.json")).text

    scenario(main)


def test_with_keys_only_administrators_get_in(port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALENCE_ADMIN_KEYS", "root=vl-environment")
    file = tmp_path / "keys"
    ann, boss = add(file, "ann"), add(file, "boss", admin=True)
    assert [key.admin for key in api_keys.read(file)] == [False, True]

    async def main() -> None:
        async with running(port, f"api.keys_file={file}", "api.admin_on_main=true") as (system, client):
            assert system.admin is not None
            async with httpx.AsyncClient(base_url=system.admin.url) as admin:
                for side in (client, admin):
                    for path in ("/admin/status", "/metrics"):
                        assert (await side.get(path)).status_code == 401
                        headers = {"authorization": f"Bearer {ann}"}
                        answer = await side.get(path, headers=headers)
                        assert error_of(answer)["code"] == "permission_denied" and answer.status_code == 403
                        for key in (boss, "vl-environment"):
                            headers = {"authorization": f"Bearer {key}"}
                            assert (await side.get(path, headers=headers)).status_code == 200
                    assert (await side.get("/health/live")).status_code == 200

    scenario(main)


def test_addresses_that_cannot_be(tmp_path: Path) -> None:
    def listen(*settings: str) -> None:
        admin_listener(Process("api", 1, load(None, [f"links.run_dir={tmp_path}", *settings])))

    with pytest.raises(ConfigError, match=r"no api\.admin_port"):
        listen("api.metrics=admin")
    with pytest.raises(ConfigError, match="choose another"):
        listen("api.port=8000", "api.admin_port=7999")
    with pytest.raises(ConfigError, match=r"api\.admin_host"):
        listen("api.admin_port=8100", "api.admin_host=no such host")


def test_what_an_administrator_asks_for(port: str) -> None:
    async def main() -> None:
        async with running(port) as (system, client):
            assert system.admin is not None
            async with httpx.AsyncClient(base_url=system.admin.url) as admin:
                asked = {"flush_prefix_cache": True, "log_level": "info", "profile": True}
                assert (await admin.post("/admin/control", json=asked)).json() == {"told": True, "draining": False}
                await system.until(lambda: bool(system.controls))
                assert system.controls == [Control(True, "info", True)]
                assert (await admin.post("/admin/control", json={"drain": True})).json()["draining"]
                assert (await client.get("/ready")).status_code == 503
                assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200, "it serves on"
                await admin.post("/admin/control", json={"drain": False})
                assert (await client.get("/ready")).status_code == 200 and len(system.controls) == 1
                wrong = await admin.post("/admin/control", json={"log_level": "loud"})
                assert error_of(wrong)["param"] == "log_level"
            assert (await client.post("/admin/control", json={})).status_code == 404

    scenario(main)
