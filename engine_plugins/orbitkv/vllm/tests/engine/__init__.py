"""The connector in the real engine, with a real agent. Runs in the engine's environment."""
