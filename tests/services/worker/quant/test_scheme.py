from services.worker.quant.scheme import GROUP, TENSOR, Numbers, Scheme


def test_schemes_are_words_for_people() -> None:
    scheme = Scheme("gptq", Numbers("int4", GROUP, 128, symmetric=False))
    assert str(scheme) == "weights int4 per group of 128, asymmetric, activations as they are (gptq)"
    static = Scheme("fp8", Numbers("fp8", TENSOR), Numbers("fp8", TENSOR, dynamic=False))
    assert str(static) == "weights fp8 per tensor, activations fp8 per tensor, static (fp8)"
    assert str(Numbers("fp4", GROUP, 32, powers=True)) == "fp4 per group of 32, powers of two"
