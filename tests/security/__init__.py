"""One test or more for each line of the issue's point on security; docs/security.md names them."""
