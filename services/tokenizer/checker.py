"""Whether clients' grammars can be used: found out in processes of their own (grammar_child.py) within hard limits.

Used by the encode pools' threads; each check has a child for itself, and one that finds none idle starts one: the first
grammar does. Owns the children, and what the last checks said.
"""

import threading
from collections import OrderedDict

from common.errors import Reject, RejectReason
from common.protocol import Grammar
from services.tokenizer.grammar_child import Check
from services.tokenizer.render_child import Refusal
from services.tokenizer.renderer import START_S, WALL_EXTRA_S, WALL_FACTOR, Child, Died

CHILD = "services.tokenizer.grammar_child"
KEPT = 256
KEPT_BYTES = 1 << 22  # of grammars' texts


class Checker:
    """`cpu_s`: processor time that one grammar may take."""

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._wait_s = cpu_s * WALL_FACTOR + WALL_EXTRA_S + START_S
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._children: set[Child] = set()
        self._known: OrderedDict[Grammar, Refusal | None] = OrderedDict()
        self._known_bytes = 0
        self._closed = False

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
        """A child that is killed by somebody else is replaced once."""
        for fresh in (False, True):
            child = self._take(fresh)
            try:
                reply = child.ask(Check(grammar, self._cpu_s), self._wait_s)
            except Died:
                self._drop(child)
                if child.overran:
                    break
                continue
            with self._lock:
                self._idle.append(child)
            return reply if isinstance(reply, Refusal) else None
        if self._closed:
            raise Reject(RejectReason.UNAVAILABLE, "the tokenizer is shutting down")
        took = f"takes more than {self._cpu_s:g} s of processor time" if child.overran else "needs too much memory"
        text = f"{grammar.param}: it {took} to prepare; make it simpler"
        return Refusal(RejectReason.INVALID, text, grammar.param or None)

    def _take(self, fresh: bool) -> Child:
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop()
        try:
            child = Child(CHILD)
        except OSError as error:
            text = f"no process for checking a grammar can be started: {error.strerror}; try again"
            raise Reject(RejectReason.UNAVAILABLE, text) from error
        with self._lock:
            self._children.add(child)
            closed = self._closed
        if closed:
            self._drop(child)
            raise Reject(RejectReason.UNAVAILABLE, "the tokenizer is shutting down")
        return child

    def close(self) -> None:
        """Ends the children; checks under way end with a Reject."""
        with self._lock:
            self._closed = True
            children = list(self._children)
            self._idle.clear()
        for child in children:
            self._drop(child)

    def _drop(self, child: Child) -> None:
        with self._lock:
            self._children.discard(child)
        child.close()
