"""What agents report: the server that takes it, and what is made of it."""
