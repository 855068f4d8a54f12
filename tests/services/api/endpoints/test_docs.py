import re

from services.api.endpoints.docs import PAGE, SCRIPT, STYLE, source
from tests.services.api.system import running, scenario


def test_the_page_needs_nothing_from_elsewhere_and_runs_only_its_own_script() -> None:
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", PAGE) and "http" not in PAGE
    assert PAGE.count(SCRIPT) == PAGE.count(STYLE) == 1

    async def main() -> None:
        async with running() as (_, client):
            answer = await client.get("/docs")
            assert answer.headers["content-type"].startswith("text/html") and answer.text == PAGE
            policy = answer.headers["content-security-policy"]
            assert source(SCRIPT) in policy and "default-src 'none'" in policy and "unsafe" not in policy
            spec = (await client.get("/openapi.json")).json()
            assert "/docs" in spec["paths"]

    scenario(main)
