"""`make demo`: the main job on real parts, start to end."""
