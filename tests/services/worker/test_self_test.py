"""Real child processes with kernels that fault, hang, give NaN, are wrong, or meddle; and the ones that are right."""

import importlib.util
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from services.worker.kernels import registry
from services.worker.kernels.known_bad import Host
from services.worker.kernels.ops.linear import linear
from services.worker.kernels.ops.rms_norm import rms_norm
from services.worker.kernels.registry import Facts, all_ops, bind
from services.worker.self_test import Begun, Job, Kept, NotTested, SelfTest, Verdict, finder_without, how, tell, wanted
from tests.services.worker.rogue_kernels import rogues

SCRIPT = Path(__file__).with_name("rogue_kernels.py")
JOB = Job(("triton", "torch"), "cpu", "", "float32", {})


def run(rogue: str, job: Job = JOB, limit_s: float = 60.0, watched: Path | None = None) -> dict[tuple[str, str], str]:
    test = SelfTest(limit_s, watched, [sys.executable, "-P", str(SCRIPT), rogue])
    verdicts = test(job, lambda what, done: None)
    assert len({(v.op, v.provider) for v in verdicts}) == len(verdicts)
    return {(v.op, v.provider): v.reason for v in verdicts}


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's imports are this tree's."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def test_each_failure_is_seen_and_the_next_goes_on() -> None:
    """One child dies, one is killed; the others' failures need no new process."""
    said = run(
        "linear=faults,silu_and_mul=hangs,gelu_and_mul=nan,rms_norm=wrong,add_rms_norm=raises,embedding,argmax=wrong,"
        "rope=meddles,draw=leaves",
        limit_s=15.0,
    )
    reasons = {op: reason for (op, provider), reason in said.items() if provider == "triton" and op}
    assert said[("", "triton")] == "" == reasons.pop("embedding")
    assert reasons.pop("linear") == "ends by SIGSEGV in case 1x576x960"
    assert reasons.pop("silu_and_mul") == "hangs: no sign of life for 15 s in case 1x1536"
    assert reasons.pop("gelu_and_mul") == "wrong in case 1x1536: result has 1 NaN or infinite numbers of 1536"
    assert reasons.pop("rms_norm").startswith("wrong in case 1x576: result is wrong in 5")
    assert reasons.pop("add_rms_norm") == "raises RuntimeError: This GEMM is not supported! in case 1x576"
    assert reasons.pop("argmax") == "wrong in case 1x49152: result differs in 1 of 1 rows"
    assert reasons.pop("rope") == "wrong in case 1x12x64r64: argument.1 was changed, and should not be"
    last = "amdgpu: Memory access fault by GPU node-1 on address 0x7f"
    assert reasons.pop("draw") == f"ends with status 134 ({last}) in case 2x49152"
    assert not reasons


@pytest.mark.parametrize(
    ("happens", "reason"),
    [("faults", "cannot be imported: it ends by SIGSEGV"), ("raises", "cannot be imported: it ends with status 1 (by")],
)
def test_a_library_that_cannot_be_imported_takes_nothing_else_with_it(happens: str, reason: str) -> None:
    said = run(f"rms_norm,import={happens}")
    assert list(said) == [("", "triton")] and said[("", "triton")].startswith(reason)


def test_what_failed_is_not_bound_and_the_table_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_for", rogues("linear=faults,rms_norm"))
    reason = "ends by SIGSEGV in case 1x576x960"
    finder = finder_without(Facts("cpu"), [Verdict("linear", "triton", reason), Verdict("rms_norm", "triton", "")])
    bindings = bind(("triton", "torch"), Facts("cpu"), finder=finder)
    assert bindings.provider(rms_norm) == "triton" and bindings(linear) is linear.meaning
    assert {row.op: row.reason for row in bindings.table}["linear"] == f"triton: {reason}"


def test_a_provider_that_cannot_be_imported_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_for", rogues("import=faults"))  # would end this very process
    finder = finder_without(Facts("cpu"), [Verdict("", "triton", "cannot be imported: it ends by SIGSEGV")])
    bindings = bind(("triton", "torch"), Facts("cpu"), finder=finder)
    assert {row.reason for row in bindings.table} == {"triton: cannot be imported: it ends by SIGSEGV"}


def test_what_is_known_bad_is_refused_without_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_for", lambda facts, provider: rogues("rms_norm")(facts, "triton"))
    facts = Facts("cuda", "gfx90a")
    impl = registry.find_for(facts, "aiter")[0]["rms_norm"]
    object.__setattr__(impl, "provider", "aiter")
    monkeypatch.setattr(registry, "find_for", lambda facts, provider: ({"rms_norm": impl}, ""))
    refusal = finder_without(facts, [], Host("0.1.20", ""))("aiter")[0]["rms_norm"].refuses(facts)
    assert refusal is not None and "ROCm/aiter#1552" in refusal
    on_good = finder_without(Facts("cuda", "gfx942"), [], Host("0.1.20", ""))("aiter")[0]["rms_norm"]
    assert on_good.refuses(Facts("cuda", "gfx942")) is None


def test_known_verdicts_are_not_tried_again() -> None:
    known = (Verdict("", "triton"), Verdict("linear", "triton", "ends by SIGSEGV in case x"))
    said = run("linear=hangs,rms_norm", Job(("triton", "torch"), "cpu", "", "float32", {}, verdicts=known))
    assert said == {
        ("", "triton"): "",
        ("linear", "triton"): "ends by SIGSEGV in case x",
        ("rms_norm", "triton"): "",
    }


@pytest.mark.parametrize("compiler", [False, True])
def test_a_build_that_goes_on_is_no_hang(tmp_path: Path, compiler: bool) -> None:
    """The test process is silent for longer than the limit while files appear, or while a compiler works."""
    works = "import time; end = time.monotonic() + 4\nwhile time.monotonic() < end: pass"
    build = (
        f"subprocess.run([sys.executable, '-c', {works!r}])"
        if compiler
        else f"[(time.sleep(0.5), (pathlib.Path({str(tmp_path)!r}) / f'object{{i}}.o').touch()) for i in range(8)]"
    )
    script = (
        "import os, sys, time, pathlib, subprocess\n"
        "fd = int(sys.argv[1]); sys.stdin.read()\n"
        'os.write(fd, b\'{"type":"Begun","op":"linear","provider":"aiter","case":"c"}\\n\')\n'
        f"{build}\n"
        'os.write(fd, b\'{"type":"Verdict","op":"linear","provider":"aiter","reason":"","cases":1}\\n\')\n'
    )
    heard: list[tuple[str, int]] = []
    test = SelfTest(1.5, None if compiler else tmp_path, [sys.executable, "-c", script])
    assert test(JOB, lambda what, done: heard.append((what, done))) == (Verdict("linear", "aiter", "", 1),)
    assert heard == [("aiter linear", 0)]


def test_a_test_process_that_takes_no_advice_is_not_started_for_ever() -> None:
    begun = b'{"type":"Begun","op":"linear","provider":"aiter","case":"c"}\n'
    script = f"import os, sys; os.write(int(sys.argv[1]), {begun!r}); os.abort()"
    with pytest.raises(NotTested, match="tries aiter linear again"):
        SelfTest(60.0, None, [sys.executable, "-c", script])(JOB, lambda what, done: None)


def test_a_test_process_that_does_nothing_is_no_verdict() -> None:
    with pytest.raises(NotTested, match=r"ends with status 3 \(no module of that name\)"):
        SelfTest(60.0, None, ["sh", "-c", "echo no module of that name; exit 3"])(JOB, lambda what, done: None)


def test_nothing_outlives_the_test(tmp_path: Path) -> None:
    """Compilers that a test process started end with it."""
    script = f"sleep 1000 & echo $! > {tmp_path}/pid; kill -SEGV $$"
    with pytest.raises(NotTested, match="ends by SIGSEGV"):
        SelfTest(60.0, None, ["sh", "-c", script])(JOB, lambda what, done: None)
    pid = int((tmp_path / "pid").read_text())
    while lives(pid):
        time.sleep(0.01)


def lives(pid: int) -> bool:
    """A process that was killed may still be on its way."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_real_kernels_of_a_cpu_are_right() -> None:
    shapes = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 300, "num_heads": 6, "num_kv_heads": 2}
    shapes |= {"head_dim": 16, "rotary_dim": 16, "block_tokens": 16, "max_rows": 4, "step_tokens": 64}
    verdicts = SelfTest(120.0)(Job(("numba", "torch"), "cpu", "", "float32", shapes), lambda what, done: None)
    assert {v.reason for v in verdicts} == {""} and sum(v.cases for v in verdicts) > 20, verdicts


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="an operating system that has no Triton")
def test_interpreted_kernels_of_triton_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them, since an interpreter takes its time."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    some = ("rms_norm", "norm_linear", "rope_kv_write", "paged_attention", "moe_route")
    known = tuple(Verdict(op, "triton") for op in all_ops() if op not in some)
    shapes = {"hidden_size": 64, "vocab_size": 200, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rotary_dim": 16}
    shapes |= {"block_tokens": 16, "max_rows": 2, "step_tokens": 24, "num_experts": 8, "top_k": 2, "expert_size": 32}
    job = Job(("triton", "torch"), "cpu", "", "float32", shapes, verdicts=known)
    said = {v.op: v for v in SelfTest(120.0)(job, lambda what, done: None)}
    assert all(said[op].reason == "" and said[op].cases >= 3 for op in some), said


def test_verdicts_are_kept_by_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept, other = Kept(tmp_path / "self-test", "key"), Kept(tmp_path / "self-test", "other")
    assert kept.load() == ()
    verdicts = (Verdict("", "triton"), Verdict("linear", "triton", "ends by SIGSEGV in case x", 7))
    kept.save(verdicts)
    assert kept.load() == verdicts and other.load() == () and os.listdir(tmp_path / "self-test") == ["key.json"]
    kept.path.write_text("{")
    assert kept.load() == () and "are tested again" in caplog.text
    kept.forget()
    kept.forget()
    assert kept.load() == ()


def test_a_folder_that_cannot_be_written_costs_a_test_at_every_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    Kept(tmp_path / "file", "key").save(())
    assert "cannot be kept" in caplog.text


def test_the_log_says_what_was_dropped(caplog: pytest.LogCaptureFixture) -> None:
    tell([Verdict("linear", "aiter", "ends by SIGSEGV in case 1x2x3"), Verdict("rope", "aiter", "")], known=False)
    assert [record.message for record in caplog.records] == [
        "dropped: linear by aiter: ends by SIGSEGV in case 1x2x3; the next provider takes its place"
    ]
    tell([Verdict("", "aiter", "cannot be imported: it hangs")], known=True)
    assert "provider aiter" in caplog.messages[-1] and "valence doctor --again" in caplog.messages[-1]


def test_when_it_is_wanted() -> None:
    for arch, auto in (("", False), ("sm_90", False), ("gfx942", True), ("gfx950", True)):
        assert [wanted(setting, arch) for setting in ("auto", "on", "off")] == [auto, True, False]


def test_how_a_child_ended() -> None:
    assert how(-6, "") == "ends by SIGABRT" and how(2, "") == "ends with status 2"
    assert how(1, "ImportError: libhsa.so") == "ends with status 1 (ImportError: libhsa.so)"
    assert Begun("a", "b", "c").op == "a" and torch.float32 is JOB.facts().dtype
