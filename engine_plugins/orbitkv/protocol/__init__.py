"""The wire between engine plugins and the node agent: versions, messages, framing, completion records.

Both sides import this package and nothing of each other.
"""
