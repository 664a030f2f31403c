"""Text on the host side: tokenizer, chat template, incremental detokenizer, stop rules, bad words."""
