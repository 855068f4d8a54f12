"""/v1/batches: files of requests, answered within a day when there is room."""

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import Reject, RejectReason
from services.api.batches.files import new_id
from services.api.batches.keeper import Store
from services.api.batches.records import Batch
from services.api.errors import invalid
from services.api.gateway import Gateway
from services.api.route import Endpoint, discover, json, read_body
from services.api.schema.batches import BATCH, WINDOW_S, BatchList, BatchObject, Page, batch_object
from services.api.tenant import tenant_of

MOST_LISTED = 100


async def create_batch(gateway: Gateway, request: Request) -> Response:
    api, owner = gateway.config.api, tenant_of(request)
    asked = BATCH.parse(await read_body(request, api))
    served = [each.path for each in discover() if each.batched]
    if asked.endpoint not in served:
        raise invalid(f"endpoint must be one of {', '.join(served)}", "endpoint")
    created, metadata = int(time.time()), msgspec.json.encode(asked.metadata).decode()
    batch = Batch(
        new_id("batch"), owner, asked.endpoint, asked.input_file_id, metadata, created, created + WINDOW_S, "validating"
    )

    def add(store: Store) -> None:
        if store.files.find(batch.input, owner) is None:
            raise Reject(RejectReason.NOT_FOUND, "there is no such file", "input_file_id")
        if not store.work.add(batch, api.max_batches):
            raise Reject(RejectReason.OVERLOADED, f"{api.max_batches} batches have not ended, try again later")

    await gateway.keeper.call(add)
    gateway.keeper.tell()
    return json(batch_object(batch))


async def list_batches(gateway: Gateway, request: Request) -> Response:
    owner = tenant_of(request)
    batches = await gateway.keeper.call(lambda store: store.work.of(owner))
    page = Page([batch_object(batch) for batch in batches], request.query_params, MOST_LISTED)
    return json(BatchList(**page.fields()))


async def show_batch(gateway: Gateway, request: Request) -> Response:
    return json(batch_object(await _found(gateway, request)))


async def cancel_batch(gateway: Gateway, request: Request) -> Response:
    batch = await _found(gateway, request)
    if not await gateway.keeper.call(lambda store: store.work.cancel(batch.id, batch.owner)):
        raise invalid(f"a batch that is {batch.status} cannot be cancelled", "batch_id")
    gateway.keeper.tell()
    return json(batch_object(await _found(gateway, request)))


async def _found(gateway: Gateway, request: Request) -> Batch:
    identity, owner = request.path_params["batch_id"], tenant_of(request)
    batch = await gateway.keeper.call(lambda store: store.work.find(identity, owner))
    if batch is None:
        raise Reject(RejectReason.NOT_FOUND, "there is no such batch", "batch_id")
    return batch


ENDPOINTS = [
    Endpoint("POST", "/v1/batches", create_batch, "Answers a file of requests", body=BATCH, reply=BatchObject),
    Endpoint("GET", "/v1/batches", list_batches, "The batches of this key", reply=BatchList),
    Endpoint("GET", "/v1/batches/{batch_id}", show_batch, "One batch", reply=BatchObject),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, "Ends a batch early", reply=BatchObject),
]
