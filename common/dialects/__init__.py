"""How models write reasoning and tool calls into their text: one file per dialect, read as the text comes.

Tokenizers choose a model's dialects (`registry.py`) and show their markers; API processes read the text with them.
"""
