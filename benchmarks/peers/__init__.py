"""bough beside the engines people run on a CPU: the same client, weights and prompts, in one run. See README.md."""
