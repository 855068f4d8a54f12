from tests.services.api.system import running, scenario


def test_the_model_is_listed_and_shown() -> None:
    async def main() -> None:
        async with running() as (_, client):
            listing = (await client.get("/v1/models")).json()
            assert listing["object"] == "list"
            (card,) = listing["data"]
            assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 128)
            assert (await client.get("/v1/models/tiny")).json() == card
            missing = await client.get("/v1/models/org/other")
            assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"

    scenario(main)


def test_there_is_no_model_before_a_worker() -> None:
    async def main() -> None:
        async with running(tokenizers=0) as (_, client):
            assert (await client.get("/v1/models")).status_code == 503

    scenario(main)
