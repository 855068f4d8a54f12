import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import api_keys
from common.protocol import FinishReason, Peer, Refused, Submit, TextFinished
from services.api.figures import Figures
from services.api.hub import Hub, Request
from services.api.routes import Routes
from services.api.tenant import owned, salt, size_of, spent
from tests.services.api.system import SUBMIT, rows

KEY = api_keys.make("ann", "one", weight=3, priority=2, soonest=-1)
names = st.from_regex(api_keys.NAME, fullmatch=True)
texts = st.text(max_size=20)


def test_without_keys_nothing_changes() -> None:
    assert owned(SUBMIT, None, None, False) is SUBMIT


@pytest.mark.parametrize(("asked", "priority"), [(None, 2), (0, 0), (7, 7), (-1, -1), (-50, -1)])
def test_the_key_decides_what_was_not_asked_for_and_how_soon_at_most(asked: int | None, priority: int) -> None:
    submit = owned(SUBMIT, KEY, asked, True)
    assert (submit.tenant, submit.weight, submit.priority, submit.cache_salt) == ("ann", 3, priority, "")
    assert KEY.hash not in str(submit) and KEY.salt not in str(submit)


@given(names, names, texts, texts)
def test_two_tenants_never_have_one_salt_and_one_always_has_its_own(one: str, two: str, own: str, other: str) -> None:
    assert salt(one, own) == salt(one, own)
    assert (salt(one, own) == salt(two, other)) is ((one, own) == (two, other))


def test_a_lone_surrogate_in_a_salt_is_a_salt() -> None:
    assert salt("ann", "\ud800") != salt("ann", "?")


def opened(*submits: Submit) -> tuple[Hub, Request]:
    hub = Hub(Routes(0, 1), 100, lambda peer, message: True, Figures(), 30.0)
    return hub, hub.open(list(submits), [Peer("tokenizer", 0, 9, "")], 0.0, 5)


def test_prompts_are_charged_once_and_every_choice_for_what_it_got() -> None:
    hub, request = opened(msgspec.structs.replace(SUBMIT, n=2), SUBMIT)
    ids = [choice.seq_id for choice in request.choices]
    hub.feed(rows(*((seq_id, 0, 4, "text") for seq_id in ids)), 1.0)
    hub.feed(rows(finished=tuple(TextFinished(seq_id, FinishReason.EOS, 10, 4) for seq_id in ids)), 1.0)
    assert spent(request) == 2 * 10 + 3 * 4


def test_who_leaves_early_pays_and_who_is_refused_does_not() -> None:
    hub, request = opened(msgspec.structs.replace(SUBMIT, text="x" * 400))
    hub.cancel(request)
    assert spent(request) == 100
    hub, request = opened(msgspec.structs.replace(SUBMIT, tokens=b"\0" * 40, text=""))
    assert size_of(request.choices[0].submit) == 10
    hub.refuse(Refused(request.choices[0].seq_id, "overloaded", "full"))
    assert spent(request) == 0 == spent(None)
