"""The worker: follows plans on one device. KV pool, forward batch, model runner, sampler."""
