import pytest

from tests.sim.several import World


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_to_schedulers_and_tokenizers_every_text_is_whole(seed: int) -> None:
    World(seed).run()
