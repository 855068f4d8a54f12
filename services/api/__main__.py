"""`python -m services.api`: one replica of the HTTP API."""

from common.lifecycle import main
from services.api.process import serve

if __name__ == "__main__":
    main("api", serve)
