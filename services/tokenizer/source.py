"""Loads a model's tokenizer and chat template. Called once per process, before it is ready."""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tokenizers import Tokenizer

from common import vocabulary
from common.config import Model
from common.dialects.registry import Dialects
from common.errors import ConfigError, Reject, RejectReason
from common.model_source import ModelFiles, resolve
from common.tokenizer_files import dialects_of, open_tokenizer
from common.vocabulary import Vocabulary
from services.tokenizer.chat import ChatTemplate
from services.tokenizer.renderer import Renderer

log = logging.getLogger("tokenizer")
TOOL_TEMPLATE = "tool_use"


class Loaded(NamedTuple):
    """Everything about a model that this service needs."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary
    template: ChatTemplate | Renderer | None
    no_template: str = ""  # why there is none
    dialects: Dialects = Dialects(None, None)
    about: Mapping[str, object] = MappingProxyType({})  # /tokenizer_info


MakeTemplate = Callable[[str, dict[str, str], str], ChatTemplate | Renderer]


def load(model: Model, make_template: MakeTemplate = ChatTemplate) -> Loaded:
    """Raises ConfigError when the model's tokenizer cannot be found or used. A service renders in another process."""
    files = resolve(model.source)
    try:
        return _load(files, model, make_template)
    except ConfigError as error:
        if str(files.path) in str(error):
            raise
        raise ConfigError(f"{files.path}: {error}") from error


def _load(files: ModelFiles, model: Model, make_template: MakeTemplate) -> Loaded:
    tokenizer, specials, templates = opened = open_tokenizer(files, model.trust_remote_code)
    words = vocabulary.build(tokenizer)
    dialects = dialects_of(files, model, opened)
    main = templates.pop("default", "")
    names = {name: specials.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "chat_template": main or None}
    if not main:
        return Loaded(tokenizer, words, None, f"the model {files.name} has no chat template", about=about)
    try:
        template = make_template(main, specials, templates.get(TOOL_TEMPLATE, ""))
        return Loaded(tokenizer, words, template, dialects=dialects, about=about)
    except Reject as fault:
        if fault.reason is not RejectReason.INVALID:
            raise  # not the template's doing: the next start may find things better
        log.warning("chat requests will be refused: %s", fault.message)
        return Loaded(tokenizer, words, None, fault.message, about=about)
