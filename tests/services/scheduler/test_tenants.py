"""What tenants were served, and which of them are remembered."""

import pytest

from services.scheduler.tenants import IDLE_KEPT, Tenant, Tenants


def test_weight_divides_what_is_charged() -> None:
    tenant = Tenant("a", 1)
    tenant.weigh(0, 4)
    tenant.charge(100)
    assert tenant.virtual(0) == 25


def test_a_lift_never_lowers() -> None:
    tenant = Tenant("a", 1)
    tenant.lift(0, 10.0)
    tenant.lift(0, 5.0)
    assert tenant.virtual(0) == 10


def test_ticks_may_begin_anew_with_a_new_worker() -> None:
    tenant = Tenant("a", 1)
    tenant.step(1000, 1)
    tenant.step(1010, -1)
    tenant.step(0, 2)
    assert (tenant.virtual(0), tenant.virtual(5)) == (10, 20)


def test_a_tenant_is_remembered_when_it_has_nothing_open() -> None:
    tenants = Tenants(lambda: 0)
    first = tenants.open("a", 1)
    assert tenants.open("a", 3) is first and first.weight == 3
    first.charge(30)
    tenants.close(first)
    tenants.close(first)
    assert len(tenants) == 0
    again = tenants.open("a", 1)
    assert again is first and again.virtual(0) == 10


def test_names_do_not_pile_up() -> None:
    tenants = Tenants(lambda: 0)
    first = tenants.open("first", 1)
    tenants.close(first)
    for number in range(IDLE_KEPT):
        tenants.close(tenants.open(f"t{number}", 1))
    assert tenants.open("first", 1) is not first and len(tenants) == 1


def test_nonsense_weights_are_one() -> None:
    assert Tenants(lambda: 0).open("a", -5).weight == 1


def test_the_least_served_is_first_then_the_elder_then_the_key() -> None:
    tenants = Tenants(lambda: 0)
    one, two = tenants.open("a", 1), tenants.open("b", 1)
    assert tenants.rank(one, (5, 9)) < tenants.rank(two, (0, 0))
    one.charge(1)
    assert tenants.rank(two, (5, 9)) < tenants.rank(one, (0, 0))
    assert tenants.rank(two, (0, 3)) < tenants.rank(two, (1, 2))


def test_check_counts() -> None:
    tenant = Tenant("a", 1)
    tenant.check([], 0, 0)
    tenant.step(0, 1)
    with pytest.raises(AssertionError, match="rows that step"):
        tenant.check([], 0, 0)
