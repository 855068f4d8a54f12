from common.buckets import Buckets
from common.membership import Membership
from common.metrics import METRICS
from common.protocol import Load, Member, Members, ModelFacts, Peer
from services.api.figures import Figures
from services.api.vllm_metrics import families

FACTS = ModelFacts("tiny", "llama", 1000, 128, (2,), 16, 64, dtype="bfloat16")
Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(view: Membership) -> Samples:
    """By name and values of the labels behind model_name, in the order of their names."""
    found: Samples = {}
    for family in families(view, view.standings()):
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name != "model_name")
            assert (sample.name, labels) not in found, "a series twice"
            found[sample.name, labels] = sample.value
    return found


def scheduler(instance: int, incarnation: int, **counters: float) -> Member:
    step = Buckets(METRICS["step_tokens"].bounds)
    step.add(100, 3)
    peer = Peer("scheduler", instance, incarnation, "")
    return Member(peer, "ready", 0, None, {"output_tokens": 1.0} | counters, {"step_tokens": step.pack()})


def api(instance: int, engine: int, first_tokens: int) -> Member:
    figures = Figures()
    figures.at(engine).first_token.add(0.03, first_tokens)
    figures.at(engine).finished["length"] += first_tokens
    figures.prompt_tokens = 1000  # the scheduler counts them, too
    peer = Peer("api", instance, 100 + instance, "")
    return Member(peer, "ready", 0, None, figures.counters(), figures.histograms())


def test_replicas_are_summed_and_schedulers_told_apart() -> None:
    view = Membership()
    apis = [api(0, 0, 2), api(1, 1, 3), api(2, 1, 4)]
    first = scheduler(0, 1, computed_tokens=30.0, cached_tokens=12.0)
    view.update(1, Members([first, *apis], [], Load(running=5), FACTS), 0.0)
    second = scheduler(1, 2, computed_tokens=7.0)
    view.update(2, Members([second, *apis], [], Load(running=6), FACTS), 0.0)
    found = samples(view)
    assert [found["vllm:time_to_first_token_seconds_count", (engine,)] for engine in "01"] == [2, 7]
    assert [found["vllm:request_success_total", (engine, "length")] for engine in "01"] == [2, 7]
    assert [found["vllm:prompt_tokens_total", (engine,)] for engine in "01"] == [42, 7]
    assert found["vllm:prompt_tokens_by_source_total", ("0", "local_cache_hit")] == 12
    assert [found["vllm:iteration_tokens_total_sum", (engine,)] for engine in "01"] == [300, 300]
    assert [found["vllm:num_requests_running", (engine,)] for engine in "01"] == [5, 6]


def test_buckets_are_those_of_vllm() -> None:
    view = Membership()
    view.update(1, Members([scheduler(0, 1), api(0, 0, 2)], [], Load(), FACTS), 0.0)
    found = samples(view)

    def bounds(name: str) -> list[float]:
        # labels in alphabetical order: engine, le
        return [float(labels[1]) for each, labels in found if each == f"vllm:{name}_bucket"]

    gaps = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
    assert bounds("inter_token_latency_seconds")[:-1] == gaps == bounds("time_per_output_token_seconds")[:-1]
    latency = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert bounds(f"{name}_seconds")[:-1] == latency
    first = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160]
    assert bounds("time_to_first_token_seconds")[:-1] == [*first, 640, 2560]
    assert bounds("iteration_tokens_total")[:-1] == [1, *(2**power for power in range(3, 15))]
    assert bounds("request_prompt_tokens")[:-1] == [1, 2, 5, 10, 20, 50, 100]  # the model has 128
    assert bounds("request_params_n")[:-1] == [1, 2, 5, 10, 20]
    assert found["vllm:time_to_first_token_seconds_bucket", ("0", "0.02")] == 0
    assert found["vllm:time_to_first_token_seconds_bucket", ("0", "0.04")] == 2


def test_an_endpoint_picker_finds_what_it_reads() -> None:
    """What the model server protocol of the Gateway API Inference Extension asks for, of the types it asks for."""
    view = Membership()
    load = Load(running=3, waiting=2, blocks_total=10, blocks_free=4, blocks_cached=1)
    view.update(1, Members([scheduler(0, 1)], [], load, FACTS), 0.0)
    by_name = {family.name: family for family in families(view, view.standings())}
    gauges = {
        "vllm:num_requests_waiting": 2.0,  # TotalQueuedRequests
        "vllm:num_requests_running": 3.0,  # TotalRunningRequests
        "vllm:kv_cache_usage_perc": 0.5,  # KVCacheUtilization
        "vllm:gpu_cache_usage_perc": 0.5,  # its older name
        "vllm:cache_config_info": 1.0,
    }
    for name, value in gauges.items():
        assert by_name[name].type == "gauge"
        assert [sample.value for sample in by_name[name].samples] == [value]
    (cache,) = by_name["vllm:cache_config_info"].samples
    assert (cache.labels["block_size"], cache.labels["num_gpu_blocks"]) == ("16", "64")


def test_every_series_is_there_before_anything_happens() -> None:
    view = Membership()
    view.update(1, Members([Member(Peer("scheduler", 0, 1, ""), "ready")], [], Load(), None), 0.0)
    found = samples(view)
    assert found["vllm:generation_tokens_total", ("0",)] == 0
    assert found["vllm:request_success_total", ("0", "repetition")] == 0
    assert found["vllm:e2e_request_latency_seconds_count", ("0",)] == 0
    assert found["vllm:kv_cache_usage_perc", ("0",)] == 0
