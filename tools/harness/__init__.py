"""Starts and drives real processes: the node agent, engines, `vllm serve`. For the demo and the engine's tests."""
