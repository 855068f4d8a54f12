"""Batches: files of requests that are answered when there is room, and outlive every process."""
