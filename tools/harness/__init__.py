"""Starts and drives real processes: the node agent, engines, `vllm serve`. Shared by the demo and the engine's tests."""
