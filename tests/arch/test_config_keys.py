"""The list of configuration keys is frozen: a new key is a decision, made here."""

from common.config import keys

KEYS = """
model.source model.name model.dtype model.weights model.max_len model.trust_remote_code
model.tool_parser model.reasoning_parser model.pooling model.normalize model.matryoshka
kv.block_tokens kv.blocks kv.memory_gib kv.gpu_memory_utilization kv.dtype kv.prefix_cache
kv.share_prefix_across_tenants kv.checkpoint_tokens kv.events_endpoint kv.events_replay_endpoint kv.events_topic
kv.events_buffer
scheduler.policy scheduler.max_rows scheduler.step_tokens scheduler.chunk_tokens scheduler.max_waiting
scheduler.plans_in_flight scheduler.max_worker_deaths scheduler.step_deadline_s scheduler.max_waiting_tokens
scheduler.priority_ageing_s scheduler.chunk_context scheduler.chunk_beside
worker.kind worker.device worker.threads worker.kernels worker.compile_level worker.max_graph_rows worker.cache_dir
worker.step_us worker.self_test worker.self_test_s worker.near_cpus worker.tensor_parallel
worker.null_echo worker.quantize
api.host api.port api.keys_file api.deadline_s api.max_deadline_s
api.max_open_requests api.max_header_bytes api.max_header_s api.max_body_bytes api.max_body_s api.cors_origins
api.max_choices api.max_buffered_events api.retry_after_s api.max_retry_after_s api.max_held_bytes api.slow_client_s
api.drain_lag_s api.admin_host api.admin_port api.admin_on_main api.metrics api.max_messages api.door
api.storage_dir api.max_file_bytes api.storage_bytes api.batch_requests api.max_batch_requests api.max_batches
api.max_responses api.response_bytes api.response_age_s api.max_logprobs
tokenizer.threads tokenizer.max_template_chars tokenizer.max_template_s tokenizer.max_grammar_s
services.api.replicas services.tokenizer.replicas services.worker.replicas services.scheduler.replicas
links.run_dir links.transport links.host links.scheduler_port links.queue links.heartbeat_s links.dead_after_s
links.drain_s links.recover_s links.stalled_after_s links.keys_dir links.insecure_tcp
log.level log.format
speculative.method speculative.tokens speculative.ngram_min speculative.ngram_max speculative.model
speculative.max_rows
traces.endpoint traces.ratio
"""


def test_the_keys_are_these() -> None:
    assert keys() == KEYS.split()
