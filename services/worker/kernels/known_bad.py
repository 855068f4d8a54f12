"""What is known to be wrong with a library of kernels: combinations that are refused by rule, each with its reference.

Data, and the one question asked of it. A rule stays until the library's releases no longer have the fault; it is for
what a self-test of one process cannot see (what happens after idling, among ranks, in a release as a whole). What a
self-test can see is left to it: `SUSPECT` names the sizes that others have seen fail, and those are tested too.
Callers: binding at start, `valence doctor`. docs/adr/0022 says of every thread we know where it is handled.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from services.worker.kernels.registry import Facts


class Host(NamedTuple):
    """Versions as their owners write them; empty: not there, or not told."""

    aiter: str = ""
    rocm: str = ""


class Rule(NamedTuple):
    """Applies if everything that is given here fits: empty fields fit all."""

    reference: str
    why: str
    provider: str = "aiter"
    ops: str = ""  # a regular expression of the whole name
    arches: tuple[str, ...] = ()
    not_arches: tuple[str, ...] = ()  # applies on all but these
    aiter: tuple[str, ...] = ()  # releases, like "0.1.16": with all of its post-releases
    rocm: tuple[str, ...] = ()
    above: Mapping[str, int] = {}  # shapes that are larger than this


RULES = (
    Rule(
        reference="ROCm/aiter#1552",
        why="AITER knows no other architectures, and ends in KeyError on them",
        not_arches=("gfx942", "gfx950"),
    ),
    Rule(
        reference="vllm-project/vllm#51580",
        why="its fused mixtures of experts give NaN on gfx942 from the second token on",
        ops=r"moe_(?!route).*",
        arches=("gfx942",),
        aiter=("0.1.16",),
    ),
    Rule(
        reference="ROCm/aiter#5679",
        why="decode of more than 4 tokens per row is silently wrong on gfx942",
        ops=r"mla_decode.*",
        arches=("gfx942",),
        above={"verify_tokens": 4},
    ),
    Rule(
        reference="ROCm/aiter PR 3290",
        why="ROCm 7.2.0 crashes all-reduce in captured graphs",
        ops=r"all_reduce.*",
        rocm=("7.2.0",),
    ),
    Rule(
        reference="ROCm/aiter#4888",
        why="sums with the norm behind them are wrong in the first replay after idling on gfx942",
        ops="all_reduce_add_norm",
        arches=("gfx942",),
    ),
)

# Tokens per step at which a kernel is known to have faulted, by op.
SUSPECT = (
    ("ROCm/aiter#4783", r"moe_(?!route).*", (304, 336)),  # fp8 in blocks of 128, gfx942
)

# Switches of AITER that must not be left to its defaults, by architecture.
SWITCHES: tuple[tuple[str, str, str, str], ...] = (
    ("ROCm/aiter#1143", "gfx942", "AITER_ENABLE_VSKIP", "0"),  # not set means on: DeepSeek-R1 faults on MI300X
    ("ROCm/aiter#4888", "gfx942", "AITER_AR_1STAGE", "0"),  # one stage is wrong in the first replay after idling
)


def refusal(op: str, provider: str, facts: Facts, host: Host) -> str | None:
    """Why this provider may not run the op here, with the reference; None if nothing is known against it."""
    for rule in RULES:
        if _applies(rule, op, provider, facts, host):
            return f"known bad: {rule.why} ({rule.reference})"
    return None


def _applies(rule: Rule, op: str, provider: str, facts: Facts, host: Host) -> bool:
    return (
        rule.provider == provider
        and (not rule.ops or re.fullmatch(rule.ops, op) is not None)
        and (not rule.arches or facts.arch in rule.arches)
        and (not rule.not_arches or facts.arch not in rule.not_arches)
        and (not rule.aiter or release_of(host.aiter) in rule.aiter)
        and (not rule.rocm or release_of(host.rocm) in rule.rocm)
        and all(facts.shapes.get(name, 0) > most for name, most in rule.above.items())
    )


def release_of(version: str) -> str:
    """`0.1.16` of `0.1.16.post3+rocm7`: the numbers of a release, at most three."""
    found = re.match(r"\d+(\.\d+){0,2}", version)
    return found[0] if found else ""


def suspect_tokens(op: str, most: int) -> tuple[int, ...]:
    """Sizes up to `most` at which the op has failed elsewhere."""
    return tuple(n for _, ops, tokens in SUSPECT if re.fullmatch(ops, op) for n in tokens if n <= most)


def switches(arch: str) -> dict[str, str]:
    """AITER's variables on this architecture."""
    return {name: value for _, only, name, value in SWITCHES if only == arch}
