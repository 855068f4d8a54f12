"""One module per group of endpoints, found by scanning this folder; each lists its ENDPOINTS."""
