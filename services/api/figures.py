"""Figures that the API counts itself: latencies, ends of requests, HTTP answers. Pure.

Owned by the process; the hub and the HTTP edge add to it, heartbeats tell them (common/metrics.py has names and
bounds). What belongs to a scheduler's work is counted by its instance, which metrics call the engine.
"""

from collections import Counter

from common.buckets import Buckets
from common.metrics import METRICS, series

REASONS = ("stop", "length", "abort", "error", "repetition")


def buckets(name: str) -> Buckets:
    return Buckets(METRICS[name].bounds)


class Engine:
    """What came of the work of one scheduler."""

    def __init__(self) -> None:
        self.first_token = buckets("time_to_first_token_seconds")
        self.inter_token = buckets("inter_token_latency_seconds")
        self.per_token = buckets("request_time_per_output_token_seconds")
        self.request = buckets("e2e_request_latency_seconds")
        self.prompt_size = buckets("request_prompt_tokens")
        self.output_size = buckets("request_generation_tokens")
        self.longest_output = buckets("request_max_num_generation_tokens")
        self.max_tokens = buckets("request_params_max_tokens")
        self.choices = buckets("request_params_n")
        self.finished: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    def histograms(self) -> dict[str, Buckets]:
        """By the names of common/metrics.py."""
        return {
            "time_to_first_token_seconds": self.first_token,
            "inter_token_latency_seconds": self.inter_token,
            "request_time_per_output_token_seconds": self.per_token,
            "e2e_request_latency_seconds": self.request,
            "request_prompt_tokens": self.prompt_size,
            "request_generation_tokens": self.output_size,
            "request_max_num_generation_tokens": self.longest_output,
            "request_params_max_tokens": self.max_tokens,
            "request_params_n": self.choices,
        }


class Figures:
    def __init__(self) -> None:
        self.engines = {0: Engine()}
        self.requests = 0
        self.refused = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.unknown_results = 0
        self.slow_clients = 0
        self.pauses = 0
        self.edge = Answers()

    def at(self, engine: int) -> Engine:
        found = self.engines.get(engine)
        if found is None:
            found = self.engines[engine] = Engine()
        return found

    def counters(self) -> dict[str, float]:
        """By the names of common/metrics.py."""
        found: dict[str, float] = {
            "requests": self.requests,
            "refused": self.refused,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "unknown_results": self.unknown_results,
            "slow_clients": self.slow_clients,
            "slow_client_pauses": self.pauses,
        }
        for number, engine in self.engines.items():
            found |= {series("finished", number, reason): count for reason, count in engine.finished.items()}
        for (route, method, status), count in self.edge.http.items():
            found[series("http_requests", method, status, route)] = count
        for (key, result), count in self.edge.keys.items():
            found[series("api_key_requests", result, key)] = count
        return found

    def histograms(self) -> dict[str, bytes]:
        """Likewise, packed."""
        found = {
            series(name, number): each.pack()
            for number, engine in self.engines.items()
            for name, each in engine.histograms().items()
        }
        for (method, route), seconds in self.edge.http_seconds.items():
            found[series("http_request_duration_seconds", method, route)] = seconds.pack()
        return found


class Answers:
    """What the HTTP edge counts."""

    def __init__(self) -> None:
        self.http: Counter[tuple[str, str, int]] = Counter()  # (route, method, status)
        self.http_seconds: dict[tuple[str, str], Buckets] = {}  # by method and route
        self.keys: Counter[tuple[str, str]] = Counter()  # (name of the API key, "accepted" or "limited")

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """One HTTP answer, up to its last byte."""
        self.http[route, method, status] += 1
        if (method, route) not in self.http_seconds:
            self.http_seconds[method, route] = buckets("http_request_duration_seconds")
        self.http_seconds[method, route].add(seconds)
