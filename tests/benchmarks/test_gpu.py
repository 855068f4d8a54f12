from pathlib import Path

from benchmarks.gpu import OP_TESTS, Part, Runner, kernel_lines, op_tests, parts, rows, summary, values_of


def test_a_failed_part_and_a_slow_one_stop_nothing(tmp_path: Path) -> None:
    runner = Runner(tmp_path, 100.0, ["worker.device=cpu"])
    writes = "import sys, json; json.dump([{'name': 'step_8b_batch_1', 'value': 4.0}], open(sys.argv[2], 'w'))"
    runner.run(Part("good", ("-c", writes), 60))
    runner.run(Part("bad", ("-c", "print('why'); raise SystemExit(3)"), 60))
    runner.run(Part("slow", ("-c", "import time; time.sleep(60)"), 0.5))
    runner.skip(Part("late", (), 1), "no time")
    runner.close()
    assert [outcome.status for outcome in runner.outcomes] == [
        "ok",
        "failed (3)",
        "out of time",
        "not begun: no time",
    ]
    assert "why" in runner.outcomes[1].output and "why" in (tmp_path / "log.txt").read_text()
    assert (
        runner.results == {"good": [{"name": "step_8b_batch_1", "value": 4.0}]} and (tmp_path / "results.json").exists()
    )
    assert len(summary(runner.outcomes, runner.results)) == 2


def test_figures_are_held_against_goals() -> None:
    values = {"step_8b_batch_1": 4.0, "step_0.6b_64_sequences": 20_000.0, "step_30b-a3b_batch_1": 3.0}
    found = dict(rows(values))
    assert found["batch 1, ms/token"] == ["-", "4.000 (goal 4.2, vLLM 5.06)*", "3.000 (goal 2.3, vLLM 4.26)"]
    assert found["offline 64, tok/s"] == ["20,000 (1.08x) ", "-", "-"]


def test_all_fits_into_what_a_machine_is_lent_for() -> None:
    assert len({part.name for part in parts()}) == len(parts())
    assert parts()[0].name == "ops"  # the gate comes first


def test_each_kernel_is_tested_by_one_part() -> None:
    own, others = op_tests(True), op_tests(False)
    assert not set(own) & set(others) and any("test_moe_gated.py" in name for name in own)
    assert len(own) + len(others) == len(list(Path(OP_TESTS).glob("test_*.py")))


def test_kernels_of_a_stretch_share_a_line() -> None:
    results = [
        {"name": f"kernels_8b_decode_of_1:{name}", "value": us, "unit": "us/step", "conditions": "8b, decode of 1"}
        for name, us in (("a", 210.4), ("b", 5.0))
    ]
    kernels = {"steps": [{"model": "Llama-3.1-8B", "tokens": 1, "ms": 3.6}]}
    assert kernel_lines({"step-8b": results, "kernels": kernels}) == ["8b, decode of 1; a 210; b 5"]
    assert dict(rows(values_of({"kernels": kernels})))["step of 1, ms: kernels alone, measured"][1] == "3.60, -"
