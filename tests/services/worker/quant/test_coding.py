from services.worker.kernels.registry import all_ops
from services.worker.quant.catalog import all_formats
from services.worker.quant.coding import Coding, read_coding
from tests.services.worker.quant.kinds import KINDS


def of(name: str, quantize: str = "") -> Coding:
    return read_coding({"quantization_config": KINDS[name].settings}, "config.json", quantize)


def test_units_are_blocks_and_groups() -> None:
    assert Coding().unit == 1 and not Coding().ops and Coding().formats == []
    assert [of(name).unit for name in ("deepseek", "gptq", "compressed_fp8", "quark_mxfp4")] == [128, 64, 1, 32]
    assert of("gptq", "fp8_block").unit == 128, "what it is converted to counts"
    assert read_coding({"quantization_config": KINDS["gptq"].settings}, "", "", has_files=False).rules is None


def test_formats_name_ops_that_there_are() -> None:
    for name, form in all_formats().items():
        assert form.ops and set(form.ops) <= set(all_ops()), name
    assert of("awq").ops["int4_linear"] == 1 and "int4_linear" not in of("awq", "int8").ops
