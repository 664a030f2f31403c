"""Uploaded files and the batches that are run from them, in a folder that outlives the server."""
