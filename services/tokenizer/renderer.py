"""Chat templates in processes of their own (render_child.py), so that one which does not end costs others nothing."""

import logging
from typing import NoReturn

from common.errors import Reject, RejectReason
from services.tokenizer.chat import PARAM
from services.tokenizer.children import START_S, Child, Children, Died, wait_s
from services.tokenizer.render_child import Refusal, Render, Setup

log = logging.getLogger("tokenizer")


class Renderer:
    """A chat template as `ChatTemplate` is one. `cpu_s`: processor time that one prompt may take."""

    def __init__(self, source: str, special_tokens: dict[str, str], tool_source: str = "", cpu_s: float = 2.0) -> None:
        """Compiles the template. Raises Reject (INVALID) if that fails or takes too much."""
        self._setup = Setup(source, special_tokens, tool_source, cpu_s)
        self._wait_s = wait_s(cpu_s)
        self._children = Children("services.tokenizer.render_child", "the chat template", self._prepare)
        self._children.start()

    def render(self, messages: bytes, template_kwargs: bytes, add_generation_prompt: bool, max_chars: int) -> str:
        """As ChatTemplate.render. Raises Reject, also when the template takes too much time or memory."""
        try:
            asked = Render(messages, template_kwargs, add_generation_prompt, max_chars)
            reply = self._children.ask(asked, self._wait_s)
        except Died as died:
            self._refuse(died)
        if isinstance(reply, Refusal):
            raise Reject(RejectReason(reply.reason), reply.message, reply.param)
        return reply.text

    def close(self) -> None:
        """Ends the children; calls under way end with a Reject."""
        self._children.close()

    def _prepare(self, child: Child) -> None:
        try:
            reply = child.ask(self._setup, self._wait_s + START_S)
        except Died as died:
            child.kill()
            if child.overran:
                died.overran = True
                self._refuse(died)
            raise
        if isinstance(reply, Refusal):
            raise Reject(RejectReason(reply.reason), reply.message, reply.param)

    def _refuse(self, died: Died) -> NoReturn:
        if died.overran:
            what = f"took more than {self._setup.cpu_s:g} s of processor time"
        else:
            what = "did not end, or needed too much memory"
        log.warning("the model's chat template %s; its process was replaced", what)
        raise Reject(RejectReason.INVALID, f"the model's chat template {what} on these messages", PARAM) from None
