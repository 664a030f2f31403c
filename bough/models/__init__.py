"""One file per architecture; its name is the ``model_type`` of the Hugging Face config."""
