import pytest

from common.errors import Reject
from services.tokenizer.infill import FORMS, filled_in


@pytest.mark.parametrize("form", FORMS)
def test_each_family_s_order(form: tuple[str, str, str]) -> None:
    ids = {name: 100 + place for place, name in enumerate(form) if name}
    made = filled_in([1, 2], [3], [9], ids.get)
    assert made == ([9, 100, 1, 2, 101, 3, 102] if form[2] else [9, 101, 3, 100, 1, 2])


def test_a_model_without_such_tokens_says_so() -> None:
    with pytest.raises(Reject) as caught:
        filled_in([1], [2], [], {"<fim_prefix>": 5, "<fim_suffix>": 6}.get)
    assert caught.value.param == "suffix"
