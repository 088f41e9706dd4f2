"""Where the bytes are and who copies them."""
