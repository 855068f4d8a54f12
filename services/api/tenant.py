"""Whose a request is: its tenant, weight, priority and cache salt, all from its API key. Pure.

A tenant is a key's name: a key that is replaced under its name stays the same tenant, on every replica.
"""

import hashlib

import msgspec
from starlette.requests import Request as HttpRequest

from common.api_keys import Key
from common.protocol import FinishReason, Submit
from services.api.hub import Request

CHARS_PER_TOKEN = 4  # of a prompt that nobody counted because the client left first


def owned(submit: Submit, key: Key | None, priority: int | None, shared: bool) -> Submit:
    """The same for the scheduler's eyes. `priority` as asked for; `shared`: prefixes are shared across tenants."""
    if key is None:
        return submit
    return msgspec.structs.replace(
        submit,
        tenant=key.name,
        weight=key.weight,
        priority=max(key.priority if priority is None else priority, key.soonest),
        cache_salt=submit.cache_salt if shared else salt(key.name, submit.cache_salt),
    )


def tenant_of(http: HttpRequest) -> str:
    """The name of the API key that came with a request; empty where none is needed."""
    key: Key | None = http.scope["state"].get("owner")
    return "" if key is None else key.name


def salt(tenant: str, own: str) -> str:
    """The cache salt of a tenant's request, `own` being the one it asked for.

    Clients neither see nor choose the result, only what goes in beside the name: no request of one tenant can have
    the salt of another's, so it needs no secret. The scheduler mixes it with a seed of its own.
    """
    text = f"{tenant}\n{own}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16, person=b"valence-tenant").hexdigest()


def spent(request: Request | None) -> int:
    """Tokens that an ended request is charged: its prompts, and what it got of its choices.

    What was refused costs nothing. Who leaves before the end pays for the prompt by its size.
    """
    if request is None:
        return 0
    tokens = 0
    for choice in request.choices:
        ended = choice.finished
        tokens += choice.received
        if choice.origin == choice.first and ended is not None:
            if ended.prompt_tokens:
                tokens += ended.prompt_tokens
            elif choice.received or ended.reason is FinishReason.ABORT:
                tokens += size_of(choice.submit)
    return tokens


def size_of(submit: Submit) -> int:
    """Tokens of a prompt, estimated."""
    return len(submit.tokens) // 4 + (len(submit.text) + len(submit.messages)) // CHARS_PER_TOKEN
