import time

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from common.protocol import Load, Member, Members, Peer
from tests.services.api.system import COMPLETION, FACTS, System, running, scenario


async def scrape(system: System, client: object) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = await client.get("/metrics")  # type: ignore[attr-defined]
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_everything_is_exposed_and_parses() -> None:
    async def main() -> None:
        async with running() as (system, client):
            await client.post("/v1/completions", json={**COMPLETION, "max_tokens": 3})
            own = system.process.incarnation
            await system.until(lambda: system.members[own].counters.get("output_tokens") == 3)
            view = system.gateway.node.view
            await system.until(lambda: view.members[own].counters.get("output_tokens") == 3)
            found = await scrape(system, client)
            api = (("instance", "1"), ("service", "api"))
            tokenizer = (("instance", "0"), ("service", "tokenizer"))
            vllm = (("engine", "0"), ("model_name", "tiny"))
            assert found["valence_requests_total", api] == 1 and found["valence_requests_total", tokenizer] == 5
            assert found["valence_resident_bytes", api] > 0
            assert found["valence_up", (("instance", "1"), ("service", "api"), ("state", "ready"))] == 1
            assert found["valence_load_running", (("instance", "0"),)] == 3
            assert (
                found[
                    "valence_finished_total",
                    (("engine", "0"), ("instance", "1"), ("reason", "length"), ("service", "api")),
                ]
                == 1
            )
            assert found["vllm:num_requests_running", vllm] == 3 and found["vllm:num_requests_waiting", vllm] == 2
            assert abs(found["vllm:kv_cache_usage_perc", vllm] - 0.4) < 1e-9
            assert found["vllm:request_success_total", (*vllm[:1], ("finished_reason", "length"), *vllm[1:])] == 1
            assert found["vllm:time_to_first_token_seconds_count", vllm] == 1
            assert found["vllm:inter_token_latency_seconds_count", vllm] == 2
            assert found["valence_e2e_request_latency_seconds_count", (("engine", "0"), *api)] == 1
            cache = (("block_size", "16"), ("cache_dtype", ""), ("engine", "0"))
            sizes = (("kv_cache_max_concurrency", "8.00"), ("kv_cache_size_tokens", "1024"), ("num_gpu_blocks", "64"))
            assert found["vllm:cache_config_info", (*cache, *sizes)] == 1
            ours = (("method", "POST"), ("route", "/v1/completions"), ("service", "api"), ("status", "200"))
            route = (("instance", "1"), *ours)
            assert found["valence_http_requests_total", route] == 1

    scenario(main)


def test_it_is_served_before_anything_is_there() -> None:
    async def main() -> None:
        async with running(tokenizers=0) as (system, client):
            system.facts, system.load = None, Load()
            system.tell()
            await system.until(lambda: system.gateway.node.view.model is None)
            found = await scrape(system, client)
            assert found["vllm:kv_cache_usage_perc", (("engine", "0"), ("model_name", ""))] == 0

    scenario(main)


def test_a_member_that_goes_keeps_what_it_has_counted() -> None:
    async def main() -> None:
        async with running() as (system, client):
            peer, own = Peer("scheduler", 1, 71, ""), Member(Peer("api", 5, 9, ""), "ready", 0, None, {"requests": 4.0})
            view = system.gateway.node.view
            view.update(71, Members([Member(peer, "ready"), own], [], Load()), time.monotonic())
            view.update(71, Members([Member(peer, "ready")], [9], Load()), time.monotonic())
            found = await scrape(system, client)
            assert found["valence_requests_total", (("instance", "5"), ("service", "api"))] == 4

    scenario(main)


def test_openmetrics_has_the_same_families() -> None:
    async def main() -> None:
        async with running() as (_, client):
            text = (await client.get("/metrics")).text
            accept = {"accept": "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"}
            other = await client.get("/metrics", headers=accept)
            assert other.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
            plain = {each.name: each.type for each in text_string_to_metric_families(text)}
            found = {each.name: each.type for each in openmetrics.text_string_to_metric_families(other.text)}
            assert plain.items() <= found.items()  # the first scrape may have made a figure of its own
            assert any(name.startswith("vllm:") for name in plain)

    scenario(main)


def test_each_scheduler_is_an_engine() -> None:
    async def main() -> None:
        async with running() as (system, client):
            own = Member(Peer("scheduler", 1, 71, ""), "ready", 0, None, {"output_tokens": 4.0})
            load = Load(running=9, blocks_total=10, blocks_free=10)
            system.gateway.node.view.update(71, Members([own], [], load, FACTS), time.monotonic())
            found = await scrape(system, client)
            assert [found["valence_load_running", (("instance", str(i)),)] for i in (0, 1)] == [3, 9]
            engines = [(("engine", str(i)), ("model_name", "tiny")) for i in (0, 1)]
            assert [found["vllm:num_requests_running", engine] for engine in engines] == [3, 9]
            assert found["vllm:kv_cache_usage_perc", engines[1]] == 0
            assert found["valence_output_tokens_total", (("instance", "1"), ("service", "scheduler"))] == 4

    scenario(main)
