from tests.services.api.system import running, scenario


def test_health_when_all_is_there() -> None:
    async def main() -> None:
        async with running() as (_, client):
            for path, status in (
                ("/health", "ready"),
                ("/health/ready", "ready"),
                ("/ping", "ready"),
                ("/health/live", "live"),
            ):
                response = await client.get(path)
                assert response.status_code == 200 and response.json()["status"] == status
            assert (await client.get("/version")).json()["version"]

    scenario(main)


def test_health_tells_what_is_missing() -> None:
    async def main() -> None:
        async with running(tokenizers=0) as (_, client):
            assert (await client.get("/health/live")).status_code == 200
            for path in ("/health", "/health/ready"):
                response = await client.get(path)
                body = response.json()
                assert response.status_code == 503 and "retry-after" in response.headers
                assert body["missing"] == ["tokenizer"] and body["reason"] == "no tokenizer is ready"
                assert body["status"] == "unavailable" and body["error"]["code"] == "service_unavailable"

    scenario(main)
