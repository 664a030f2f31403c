"""From logits to tokens. Each feature has a file and owns what it keeps per row."""
