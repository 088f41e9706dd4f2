"""Sockets, authentication, liveness and registration."""
