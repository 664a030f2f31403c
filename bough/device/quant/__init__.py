"""How linear layers hold and multiply their weights."""
