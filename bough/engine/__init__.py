"""The composition root: builds the host and the device column and runs them in one process or in several."""
