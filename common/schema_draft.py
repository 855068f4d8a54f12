"""What a JSON schema's draft asks for and no grammar here enforces. Pure; called for every schema that becomes one.

llguidance names the keywords that it does not know, but takes draft 7's `contentEncoding` and `contentMediaType`, which
that draft lets validators enforce (section 8), for the remarks that they are from draft 2019-09 on.
"""

from collections.abc import Iterator
from typing import Any

DRAFT = "json-schema.org/draft-07/"
CONTENT = ("contentEncoding", "contentMediaType")
VALUES = ("const", "enum", "default", "examples")  # of which nothing is a schema
NAMED = ("properties", "patternProperties", "definitions", "$defs", "dependencies")  # schemas by names of the client's


def check_draft(schema: Any) -> None:
    """Raises ValueError naming what is not enforced; `x-guidance` with `lenient` leaves it out, as everything else."""
    if not isinstance(schema, dict) or DRAFT not in str(schema.get("$schema")):
        return
    options = schema.get("x-guidance")
    if isinstance(options, dict) and options.get("lenient"):
        return
    if found := sorted({key for each in _schemas(schema) for key in CONTENT if isinstance(each.get(key), str)}):
        raise ValueError(f"Unimplemented keys: {found}, which draft 7 lets validators enforce")


def _schemas(root: Any) -> Iterator[dict[str, Any]]:
    """This one and all within it; no recursion, since a client says how deep."""
    left = [root]
    while left:
        at = left.pop()
        if isinstance(at, list):
            left += at
        elif isinstance(at, dict):
            yield at
            for key, value in at.items():
                named = key in NAMED and isinstance(value, dict)
                left += value.values() if named else [] if key in VALUES else [value]
