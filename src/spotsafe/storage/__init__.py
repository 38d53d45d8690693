"""Where the bytes of a checkpoint lie."""
