"""Request and reply bodies: structs, their rules, and the OpenAPI document made from them."""
