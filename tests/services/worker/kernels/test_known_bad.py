"""Rules apply where they say, have a reference, and are shown with it."""

import re

import pytest
import torch

from services.worker.kernels.known_bad import (
    RULES,
    SUSPECT,
    SWITCHES,
    Host,
    refusal,
    release_of,
    suspect_tokens,
    switches,
)
from services.worker.kernels.registry import Facts

GOOD = Host("0.1.20.post1", "7.2.4")


def on(arch: str, **shapes: int) -> Facts:
    return Facts("cuda", arch, torch.bfloat16, shapes)


@pytest.mark.parametrize(
    ("op", "provider", "facts", "host", "reference"),
    [
        ("rms_norm", "aiter", on("gfx90a"), GOOD, "ROCm/aiter#1552"),
        ("rms_norm", "aiter", on("gfx942"), GOOD, ""),
        ("rms_norm", "triton", on("gfx90a"), GOOD, ""),
        ("moe_gated", "aiter", on("gfx942"), Host("0.1.16.post3"), "vllm-project/vllm#51580"),
        ("moe_block_scaled", "aiter", on("gfx942"), Host("0.1.16"), "vllm-project/vllm#51580"),
        ("moe_gated", "aiter", on("gfx950"), Host("0.1.16.post3"), ""),
        ("moe_gated", "aiter", on("gfx942"), GOOD, ""),
        ("moe_route", "aiter", on("gfx942"), Host("0.1.16.post3"), ""),
        ("linear", "aiter", on("gfx942"), Host("0.1.16.post3"), ""),
        ("mla_decode", "aiter", on("gfx942", verify_tokens=8), GOOD, "ROCm/aiter#5679"),
        ("mla_decode", "aiter", on("gfx942", verify_tokens=4), GOOD, ""),
        ("mla_decode", "aiter", on("gfx950", verify_tokens=8), GOOD, ""),
        ("all_reduce", "aiter", on("gfx950"), Host("0.1.20", "7.2.0"), "ROCm/aiter PR 3290"),
        ("all_reduce_add_norm", "aiter", on("gfx950"), Host("0.1.20", "7.2.4"), ""),
        ("all_reduce_add_norm", "aiter", on("gfx942"), Host("0.1.20", "7.2.4"), "ROCm/aiter#4888"),
        ("all_reduce", "aiter", on("gfx942"), Host("0.1.20", "7.2.4"), ""),
    ],
)
def test_rules(op: str, provider: str, facts: Facts, host: Host, reference: str) -> None:
    reason = refusal(op, provider, facts, host)
    assert (reason is None) == (reference == "") and reference in (reason or "")


def test_every_rule_can_be_looked_up_and_applies_to_something() -> None:
    references = [rule.reference for rule in RULES] + [each[0] for each in (*SUSPECT, *SWITCHES)]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+( PR |#)\d+", reference) for reference in references)
    assert all(rule.why and (rule.arches or rule.not_arches or rule.rocm or rule.aiter) for rule in RULES)


def test_releases() -> None:
    assert [release_of(v) for v in ("0.1.16.post3", "0.1.7.post2.dev18", "7.2.0", "7.2", "", "main")] == [
        "0.1.16",
        "0.1.7",
        "7.2.0",
        "7.2",
        "",
        "",
    ]


def test_sizes_that_have_failed_elsewhere_are_tested() -> None:
    assert suspect_tokens("moe_gated", 1024) == (304, 336) and suspect_tokens("moe_gated", 310) == (304,)
    assert suspect_tokens("moe_route", 1024) == () == suspect_tokens("linear", 1024)


def test_switches_are_of_one_architecture() -> None:
    assert switches("gfx942") == {"AITER_ENABLE_VSKIP": "0", "AITER_AR_1STAGE": "0"} and switches("gfx950") == {}
