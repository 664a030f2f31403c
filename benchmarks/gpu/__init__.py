"""bough on one GPU: checked, and measured against the limits of the machine, in one go. See docs/gpu.md."""
