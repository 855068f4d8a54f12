import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from common import api_keys
from common.protocol import Submit
from services.api.app import is_loopback
from services.api.guard import bearer
from services.api.route import discover
from tests.services.api.system import CHAT, COMPLETION, running, scenario
from tests.services.api.test_app import error_of

SECRET = "vl-ann-secret"


def header(secret: str = SECRET) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.fixture
def setting(tmp_path: Path) -> str:
    file = tmp_path / "keys"
    keys = [api_keys.make("ann", SECRET), api_keys.make("bob", "two", requests=1), api_keys.make("eve", "three", 0, 2)]
    keys.append(msgspec.structs.replace(api_keys.make("root", "four"), admin=True))
    file.write_bytes(api_keys.write(keys))
    return f"api.keys_file={file}"


def test_every_route_but_health_asks_for_a_key(setting: str) -> None:
    public = {endpoint.path for endpoint in discover() if endpoint.public}
    signals = {"/live", "/ready", "/progress", "/health/live", "/health/ready", "/health/progress"}
    assert public == signals | {"/health", "/ping", "/docs"}

    async def main() -> None:
        async with running(setting) as (_, client):
            others = [(each.method, each.path) for each in discover() if each.path not in public]
            assert len(others) >= 9
            for method, path in [*others, ("GET", "/nothing"), ("OPTIONS", "/v1/models"), ("GET", "/health%0a")]:
                for headers, challenge in (({}, "Bearer"), (header("wrong"), 'Bearer error="invalid_token"')):
                    response = await client.request(method, path, headers=headers)
                    assert response.status_code == 401 and response.headers["www-authenticate"] == challenge
                    error = error_of(response)
                    anthropic = ("authentication_error", None)
                    kind = anthropic if "/messages" in path else ("invalid_request_error", "invalid_api_key")
                    assert (error["type"], error["code"]) == kind
                    assert "wrong" not in response.text and len(response.headers["x-request-id"]) == 32
            for path in public:
                assert (await client.get(path)).status_code == 200
            assert error_of(await client.get("/metrics", headers=header()))["code"] == "permission_denied"
            for path in ("/v1/models", "/version", "/openapi.json"):
                assert (await client.get(path, headers=header())).status_code == 200
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION), ("/tokenize", CHAT)):
                assert (await client.post(path, json=body, headers=header())).status_code in (200, 400)
                assert (await client.post(path, json=body)).status_code == 401
            assert (await client.get("/nothing", headers=header())).status_code == 404

    scenario(main)


@pytest.mark.parametrize(
    ("values", "secret"),
    [
        ([b"Bearer abc"], b"abc"),
        ([b"bEARER  abc "], b"abc"),
        ([b"Basic abc"], b""),
        ([b"abc"], b""),
        ([b"Bearer"], b""),
        ([b"Bearer "], b""),
        ([b"Bearer abc", b"Bearer abc"], b""),
        ([], b""),
    ],
)
def test_the_authorization_header(values: list[bytes], secret: bytes) -> None:
    assert bearer([(b"x", b"y"), *((b"authorization", value) for value in values)]) == secret
    if values:  # it goes before Anthropic's header
        assert bearer([(b"x-api-key", b"other"), *((b"authorization", value) for value in values)]) == secret


def test_the_header_of_anthropics_clients() -> None:
    assert bearer([(b"x-api-key", b" abc ")]) == b"abc"
    assert bearer([(b"x-api-key", b"abc"), (b"x-api-key", b"abc")]) == b""


def test_limits_of_a_key_hold_while_its_streams_are_open(setting: str) -> None:
    async def main() -> None:
        async with running(setting, "api.retry_after_s=7") as (system, client):
            (tokenizer,) = system.tokenizers
            tokenizer.on_submit = lambda submit: None
            body = {**COMPLETION, "stream": True}
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(client.post("/v1/completions", json=body, headers=header("two")))
                await system.until(lambda: len(tokenizer.submits) == 1)
                refused = await client.post("/v1/completions", json=COMPLETION, headers=header("two"))
                assert refused.status_code == 429 and refused.headers["retry-after"] == "7"
                assert error_of(refused)["code"] == "rate_limit_exceeded"
                assert (await client.get("/v1/models", headers=header("two"))).status_code == 200
                tokenizer.on_submit = tokenizer.answer
                assert (await client.post("/v1/completions", json=COMPLETION, headers=header())).status_code == 200
                tokenizer.answer(tokenizer.submits[0])
                assert (await first).status_code == 200
            assert (await client.post("/v1/completions", json=COMPLETION, headers=header("two"))).status_code == 200

    scenario(main)


def test_requests_a_minute(setting: str) -> None:
    async def main() -> None:
        async with running(setting) as (system, client):
            for _ in range(2):
                assert (await client.post("/v1/completions", json=COMPLETION, headers=header("three"))).is_success
            refused = await client.post("/v1/completions", json=COMPLETION, headers=header("three"))
            assert refused.status_code == 429 and 50 < int(refused.headers["retry-after"]) <= 60
            keys = system.gateway.figures.edge.keys
            assert keys == {("eve", "accepted"): 2, ("eve", "limited"): 1}
            own = system.process.incarnation
            view = system.gateway.node.view
            await system.until(lambda: view.members[own].counters.get("api_key_requests|limited|eve") == 1)
            page = (await client.get("/metrics", headers=header("four"))).text
            labels = 'instance="1",key="eve",result="accepted",service="api"'
            assert f"valence_api_key_requests_total{{{labels}}} 2.0" in page
            assert "three" not in page and SECRET not in page

    scenario(main)


def test_tokens_a_minute_are_charged_and_what_is_left_is_told(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(api_keys.write([api_keys.make("ann", SECRET, per_minute=9, tokens_per_minute=20)]))

    async def main() -> None:
        async with running(f"api.keys_file={file}") as (_, client):
            left, body = [], {**COMPLETION, "max_tokens": 3}  # 7 prompt tokens and these
            for stream in (False, True):
                answer = await client.post("/v1/completions", json={**body, "stream": stream}, headers=header())
                assert answer.status_code == 200
                left.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
            assert left[0] == 20 and 10 <= left[1] <= 11
            refused = await client.post("/v1/completions", json=body, headers=header())
            assert refused.status_code in (200, 429)  # a token is worked off in 3 s
            while refused.status_code == 200:
                refused = await client.post("/v1/completions", json=body, headers=header())
            assert error_of(refused)["code"] == "rate_limit_exceeded" and "20 tokens" in refused.text
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
            assert refused.headers["x-ratelimit-limit-requests"] == "9"
            assert refused.headers["x-ratelimit-reset-tokens"].endswith("s")
            assert "x-ratelimit-limit-tokens" not in (await client.get("/v1/models", headers=header())).headers

    scenario(main)


def test_the_scheduler_hears_the_tenant_and_not_the_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    ann = api_keys.make("ann", SECRET, weight=3, priority=4, soonest=1)
    file.write_bytes(api_keys.write([ann, api_keys.make("bob", "two")]))
    submits: list[Submit] = []

    async def main() -> None:
        async with running(f"api.keys_file={file}") as (system, client):
            for secret, more in (
                (SECRET, {}),
                (SECRET, {"priority": -9, "cache_salt": "x"}),
                ("two", {"priority": -9}),
            ):
                await client.post("/v1/completions", json={**COMPLETION, **more}, headers=header(secret))
            submits.extend(system.tokenizers[0].submits)

    scenario(main)
    assert [(each.tenant, each.weight, each.priority) for each in submits] == [
        ("ann", 3, 4),
        ("ann", 3, 1),
        ("bob", 1, -9),
    ]
    assert not any(word in str(each) for each in submits for word in (SECRET, ann.hash, ann.salt))


@pytest.mark.parametrize("shared", [False, True])
def test_a_tenant_has_one_cache_salt_on_all_replicas_and_nobody_else_has_it(tmp_path: Path, shared: bool) -> None:
    file = tmp_path / "keys"
    file.write_bytes(api_keys.write([api_keys.make("ann", SECRET), api_keys.make("bob", "two")]))
    salts: list[list[str]] = []

    async def main() -> None:
        for _ in range(2):  # two replicas that share nothing but the file
            setting = f"kv.share_prefix_across_tenants={str(shared).lower()}"
            async with running(f"api.keys_file={file}", setting) as (system, client):
                for secret in (SECRET, "two"):
                    for more in ({}, {"cache_salt": "own"}):
                        await client.post("/v1/completions", json={**COMPLETION, **more}, headers=header(secret))
                salts.append([submit.cache_salt for submit in system.tokenizers[0].submits])

    scenario(main)
    assert salts[0] == salts[1] and len(salts[0]) == 4
    assert len(set(salts[0])) == (2 if shared else 4) and ("" in salts[0]) is shared


def test_a_key_is_in_no_log(setting: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(setting, "log.level=debug") as (_, client):
            for secret in (SECRET, "wrong-secret"):
                await client.post("/v1/completions", json={**COMPLETION, "temperature": 9}, headers=header(secret))
                await client.get("/v1/models", headers=header(secret))

    with caplog.at_level(logging.DEBUG):
        scenario(main)
    ours = [record.getMessage() for record in caplog.records if record.name == "api"]
    assert any("401" in line for line in ours) and any("GET /v1/models 200" in line for line in ours)
    assert not any("secret" in record.getMessage() for record in caplog.records if "httpx" not in record.name)


def test_keys_of_the_environment_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALENCE_API_KEYS", "ann=vl-env")

    async def main() -> None:
        async with running() as (_, client):
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/v1/models", headers=header("vl-env"))).status_code == 200

    scenario(main)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_open_server_on_the_network_is_warned_about(
    host: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running(f"api.host={host}"):
            pass

    scenario(main)
    assert ("no API keys are set" in caplog.text) is warned


def test_which_addresses_are_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "host.example", "")))
