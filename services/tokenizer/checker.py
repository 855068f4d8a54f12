"""Whether clients' grammars can be used: found out in processes of their own (grammar_child.py) within hard limits.

Used by the encode pools' threads. Owns what the last checks said; the first grammar starts the first child.
"""

import threading
from collections import OrderedDict

from common.errors import Reject, RejectReason
from common.protocol import Grammar
from services.tokenizer.children import START_S, Children, Died, wait_s
from services.tokenizer.grammar_child import Check
from services.tokenizer.render_child import Refusal

CHILD = "services.tokenizer.grammar_child"
KEPT = 256
KEPT_BYTES = 1 << 22  # of grammars' texts


class Checker:
    """`cpu_s`: processor time that one grammar may take."""

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._wait_s = wait_s(cpu_s) + START_S  # the first that a child is asked
        self._children = Children(CHILD, "checking a grammar")
        self._lock = threading.Lock()
        self._known: OrderedDict[Grammar, Refusal | None] = OrderedDict()
        self._known_bytes = 0

    def check(self, grammar: Grammar) -> None:
        """Raises Reject that names the request's field, also when it takes too much time or memory."""
        with self._lock:
            found = grammar in self._known
            refusal = self._known.get(grammar)
        if not found:
            refusal = self._ask(grammar)
            self._keep(grammar, refusal)
        if refusal is not None:
            raise Reject(RejectReason(refusal.reason), refusal.message, refusal.param)

    def _keep(self, grammar: Grammar, refusal: Refusal | None) -> None:
        with self._lock:
            if grammar not in self._known:
                self._known[grammar] = refusal
                self._known_bytes += len(grammar.text)
            while len(self._known) > KEPT or self._known_bytes > KEPT_BYTES:
                self._known_bytes -= len(self._known.popitem(last=False)[0].text)

    def _ask(self, grammar: Grammar) -> Refusal | None:
        try:
            reply = self._children.ask(Check(grammar, self._cpu_s), self._wait_s)
        except Died as died:
            took = f"takes more than {self._cpu_s:g} s of processor time" if died.overran else "needs too much memory"
            text = f"{grammar.param}: it {took} to prepare; make it simpler"
            return Refusal(RejectReason.INVALID, text, grammar.param or None)
        return reply if isinstance(reply, Refusal) else None

    def close(self) -> None:
        """Ends the children; checks under way end with a Reject."""
        self._children.close()
