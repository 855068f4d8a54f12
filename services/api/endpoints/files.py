"""/v1/files: what batches read and write. Each API key sees its own files."""

import os
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from common.errors import Reject, RejectReason
from services.api.batches.keeper import Store
from services.api.batches.records import File
from services.api.errors import invalid
from services.api.gateway import Gateway
from services.api.route import Endpoint, json
from services.api.schema.batches import FileDeleted, FileList, FileObject, Page, file_object
from services.api.tenant import tenant_of
from services.api.upload import Form, receive

PURPOSES = ("batch",)
LEAST_EXPIRY_S, MOST_EXPIRY_S = 3600, 30 * 24 * 3600
MOST_LISTED = 10_000


async def upload_file(gateway: Gateway, request: Request) -> Response:
    api, owner = gateway.config.api, tenant_of(request)
    announced = request.headers.get("content-length", "")
    coming = int(announced) if announced.isdigit() else api.max_file_bytes

    def place(store: Store) -> Path:
        if store.files.total_bytes() + min(coming, api.max_file_bytes) > api.storage_bytes:
            raise HTTPException(507, f"all files together may have {api.storage_bytes} bytes: delete some")
        return store.files.arriving()

    path = await gateway.keeper.call(place)
    try:
        form = await receive(request, api, path)
        purpose = form.fields.get("purpose")
        if purpose not in PURPOSES:
            raise invalid(f"purpose must be one of {', '.join(PURPOSES)}", "purpose")
        file = await gateway.keeper.call(lambda store: _keep(store, path, owner, form, purpose))
    finally:
        path.unlink(missing_ok=True)
    return json(file_object(file))


def _keep(store: Store, path: Path, owner: str, form: Form, purpose: str) -> File:
    with path.open("rb") as written:
        os.fsync(written.fileno())  # before an entry says that it is there
    assert form.filename is not None
    file = store.files.place(path, owner, form.filename, purpose)
    if (lasting_s := _lasting_s(form)) is not None:
        file = file._replace(expires=file.created + lasting_s)
    store.files.add(file)
    return file


def _lasting_s(form: Form) -> int | None:
    """How long the file is kept. Raises Reject."""
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("expires_after.anchor must be created_at", "expires_after[anchor]")
    well = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 9
    if seconds is None or not well or not LEAST_EXPIRY_S <= int(seconds) <= MOST_EXPIRY_S:
        message = f"expires_after.seconds must be a whole number from {LEAST_EXPIRY_S} to {MOST_EXPIRY_S}"
        raise invalid(message, "expires_after[seconds]")
    return int(seconds)


async def list_files(gateway: Gateway, request: Request) -> Response:
    owner, purpose = tenant_of(request), request.query_params.get("purpose")
    files = await gateway.keeper.call(lambda store: store.files.of(owner))
    shown = [file_object(file) for file in files if purpose in (None, file.purpose)]
    return json(FileList(**Page(shown, request.query_params, MOST_LISTED).fields()))


async def show_file(gateway: Gateway, request: Request) -> Response:
    return json(file_object(await _found(gateway, request)))


async def file_content(gateway: Gateway, request: Request) -> Response:
    file = await _found(gateway, request)
    path = await gateway.keeper.call(lambda store: store.files.path(file.id))
    return FileResponse(path, media_type="application/octet-stream", filename=file.filename)


async def delete_file(gateway: Gateway, request: Request) -> Response:
    file = await _found(gateway, request)
    await gateway.keeper.call(lambda store: store.files.delete(file.id, file.owner))
    return json(FileDeleted(file.id))


async def _found(gateway: Gateway, request: Request) -> File:
    identity, owner = request.path_params["file_id"], tenant_of(request)
    file = await gateway.keeper.call(lambda store: store.files.find(identity, owner))
    if file is None:
        raise Reject(RejectReason.NOT_FOUND, "there is no such file", "file_id")
    return file


ENDPOINTS = [
    Endpoint("POST", "/v1/files", upload_file, "Keeps a file", reply=FileObject, form=True),
    Endpoint("GET", "/v1/files", list_files, "The files of this key", reply=FileList),
    Endpoint("GET", "/v1/files/{file_id}", show_file, "One file", reply=FileObject),
    Endpoint(
        "GET", "/v1/files/{file_id}/content", file_content, "What is in it", media_type="application/octet-stream"
    ),
    Endpoint("DELETE", "/v1/files/{file_id}", delete_file, "Deletes a file", reply=FileDeleted),
]
