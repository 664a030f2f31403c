"""Who owns which KV cell: pages, rows, the radix tree, what waits for it, and their one manager."""
