"""A random Llama of two layers with the bundled model's tokenizer: hundreds of answers in minutes on a CPU.

`python -c "from pathlib import Path; from tests.clients.peers.small_model import write; write(Path('DIR'))"`
"""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.model_source import resolve
from common.tokenizer_files import open_tokenizer


def write(folder: Path) -> None:
    """As a checkpoint in an empty folder."""
    opened = open_tokenizer(resolve("bundled"), False)
    ids = {name: opened.tokenizer.token_to_id(token) for name, token in opened.specials.items()}
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=opened.tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=ids.get("bos_token"),
        eos_token_id=ids["eos_token"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    opened.tokenizer.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": opened.templates["default"],
        **opened.specials,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
