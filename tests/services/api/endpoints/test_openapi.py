import re
from typing import Any

from services.api.endpoints.openapi import document
from services.api.route import discover
from tests.services.api.system import running, scenario


def references(tree: Any) -> set[str]:
    if isinstance(tree, dict):
        own = {tree["$ref"]} if "$ref" in tree else set()
        return own.union(*map(references, tree.values()))
    return set().union(*map(references, tree)) if isinstance(tree, list) else set()


def test_the_document_lists_exactly_the_routes() -> None:
    paths = document(discover())["paths"]
    listed = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert listed == {(e.method, re.sub(r":\w+}", "}", e.path)) for e in discover()}


def test_every_reference_is_defined() -> None:
    tree = document(discover())
    defined = {f"#/components/schemas/{name}" for name in tree["components"]["schemas"]}
    assert references(tree) <= defined and "#/components/schemas/ErrorBody" in defined


def test_operations_have_names_bodies_and_parameters() -> None:
    paths = document(discover())["paths"]
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(names) == len(set(names))
    assert paths["/v1/models/{model}"]["get"]["parameters"][0]["name"] == "model"
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/CompletionRequest"}


def test_answers_and_headers_are_all_listed() -> None:
    operation = document(discover())["paths"]["/v1/completions"]["post"]
    assert {"200", "400", "401", "404", "413", "429", "503", "504"} <= operation["responses"].keys()
    assert operation["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert {entry["name"] for entry in operation["parameters"]} == {"x-request-id", "x-request-timeout-ms"}
    metrics = document(discover())["paths"]["/metrics"]["get"]
    assert metrics["responses"]["200"]["content"].keys() == {"text/plain"}


def test_it_is_served() -> None:
    async def main() -> None:
        async with running() as (_, client):
            shown = [each for each in discover() if not each.path.startswith("/admin/")]
            assert (await client.get("/openapi.json")).json() == document(shown)

    scenario(main)
