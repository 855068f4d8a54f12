"""What each tenant has been served, as virtual time: tokens computed for it / its weight. Owned by the core's state.

Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) with weights: whoever has
been served least goes first. A tenant that begins to wait is lifted to the time at which the queue stands (waiting.py),
so an idle one saves nothing up. Prompt tokens are charged when a row starts (those with KV in the cache cost nothing,
and neither does what a preemption makes us compute again), output tokens when their step is planned. A row that steps
computes one token per tick, so a tenant's time is a line between two changes and a decode step costs nothing here.
"""

from collections import OrderedDict
from collections.abc import Callable

from services.scheduler.policy import Key

IDLE_KEPT = 1024  # tenants without sequences that are remembered; one that is forgotten has its debt remitted


class Tenant:
    """`keys` are those of its waiting sequences, sorted; the queue keeps them."""

    __slots__ = ("_since", "_stepping", "_virtual", "keys", "listed", "name", "number", "open", "weight")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number  # decides between equals
        self.weight = 1
        self.open = 0  # sequences that are not finished
        self.keys: list[Key] = []
        self.listed = False  # the queue's heap has it
        self._virtual = 0.0  # at tick `_since`
        self._since = 0
        self._stepping = 0  # rows that compute a token per tick

    def virtual(self, tick: int) -> float:
        """Tokens per unit of weight, decode plans up to this tick included."""
        if not self._stepping:
            return self._virtual
        return self._virtual + self._stepping * (tick - self._since) / self.weight

    def charge(self, tokens: int) -> None:
        """Tokens that are computed besides those of the rows that step."""
        self._virtual += tokens / self.weight

    def lift(self, tick: int, least: float) -> None:
        """Its time is at least this."""
        self._settle(tick)
        self._virtual = max(self._virtual, least)

    def weigh(self, tick: int, weight: int) -> None:
        """From now on it has this weight."""
        if weight != self.weight:
            self._settle(tick)
            self.weight = weight

    def step(self, tick: int, rows: int) -> None:
        """So many rows more (or less) compute a token per tick, from the next tick on."""
        self._settle(tick)
        self._stepping += rows

    def _settle(self, tick: int) -> None:
        self._virtual = self.virtual(tick)
        self._since = tick

    def check(self, waiting: list[Key], stepping: int, open_sequences: int) -> None:
        """Asserts what can be counted from the sequences."""
        assert self.keys == sorted(waiting), f"waiting keys of tenant {self.name!r} are wrong"
        assert self._stepping == stepping, f"tenant {self.name!r} has {stepping} rows that step, not {self._stepping}"
        assert self.open == open_sequences, f"tenant {self.name!r} has {open_sequences} sequences, not {self.open}"


class Tenants:
    """All tenants with open sequences and those that had some lately. `tick` gives the present decode tick."""

    def __init__(self, tick: Callable[[], int]) -> None:
        self._tick = tick
        self._by_name: dict[str, Tenant] = {}  # with open sequences
        self._idle: OrderedDict[str, Tenant] = OrderedDict()  # without, the one that ended last at the end
        self._made = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def open(self, name: str, weight: int) -> Tenant:
        """One more sequence of this tenant, whose weight is the newest that was named."""
        tenant = self._by_name.get(name)
        if tenant is None:
            tenant = self._idle.pop(name, None)
            if tenant is None:
                self._made += 1
                tenant = Tenant(name, self._made)
            self._by_name[name] = tenant
        tenant.weigh(self._tick(), max(weight, 1))
        tenant.open += 1
        return tenant

    def close(self, tenant: Tenant) -> None:
        """One sequence less."""
        tenant.open -= 1
        if not tenant.open:
            del self._by_name[tenant.name]
            self._idle[tenant.name] = tenant
            if len(self._idle) > IDLE_KEPT:
                self._idle.popitem(last=False)

    def rank(self, tenant: Tenant, key: Key) -> tuple[float, int, Key]:
        """The place in the order in which the queue would serve sequences if all of them waited; smaller is sooner."""
        return tenant.virtual(self._tick()), tenant.number, key
